"""What a guardian moves in an epoch ends with the epoch, also where a cancellation is swallowed."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from deadpool import transfers
from deadpool.arena import Arena
from deadpool.injection import Injector
from deadpool.protocol import events as e
from deadpool.protocol.types import Epoch, Iteration, Member, MemberId, Node, Slot
from deadpool.replication import ReplicaRefused

HOLDER = Member(
    member=MemberId(2), node=Node(1), local_rank=0, host="127.0.0.1", control_port=1, data_port=2
)


class FakeChannel:
    made: list[FakeChannel]

    def __init__(self) -> None:
        self.is_closed = False
        FakeChannel.made.append(self)

    @classmethod
    async def connect(cls, holder: Member, *, token: bytes) -> FakeChannel:
        return cls()

    def close(self) -> None:
        self.is_closed = True


class Bench:
    """Transfers over fake connections. `stuck`: epochs whose puts wait, and end in a refusal
    instead of their cancellation, as asyncio.wait_for may have it before Python 3.12."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, stuck: set[int]) -> None:
        FakeChannel.made = []
        self.puts: list[tuple[int, FakeChannel]] = []
        self.events: list[e.Event] = []
        self.arena = Arena.create()
        self.arena.resize(64)
        self.arena.label(1, Slot(0), Iteration(3))

        async def put_replica(channel: Any, *, epoch: Epoch, **_: Any) -> None:
            self.puts.append((epoch, channel))
            if epoch in stuck:
                try:
                    await asyncio.Event().wait()
                except asyncio.CancelledError:
                    raise ReplicaRefused(f"epoch {epoch} has passed") from None

        monkeypatch.setattr(transfers, "Channel", FakeChannel)
        monkeypatch.setattr(transfers, "put_replica", put_replica)
        monkeypatch.setattr(transfers, "_RETRY_S", 0.001)
        self.transfers = transfers.Transfers(
            arena=self.arena,
            token=b"token",
            injector=Injector((), 0, None),
            feed=self.events.append,
            damaged=self.events.append,
            tell_trainer=lambda message: None,
            start=asyncio.get_running_loop().create_task,
        )

    def put(self, epoch: int) -> None:
        self.transfers.put(
            e.Put(epoch=Epoch(epoch), iteration=Iteration(3), slot=Slot(0), holder=HOLDER)
        )


def test_put_whose_cancellation_is_swallowed_ends_with_its_epoch(monkeypatch):
    async def body() -> None:
        bench = Bench(monkeypatch, stuck={1})
        bench.put(1)
        await asyncio.sleep(0.01)
        bench.transfers.cancel()
        bench.put(2)
        await asyncio.sleep(0.05)
        assert [epoch for epoch, _ in bench.puts] == [1, 2]
        assert bench.events == [e.PutDone(epoch=Epoch(2), iteration=Iteration(3))]
        assert [channel.is_closed for channel in FakeChannel.made] == [True, False]
        others = asyncio.all_tasks() - {asyncio.current_task()}
        assert not others

    asyncio.run(body())


def test_puts_of_an_epoch_share_one_connection_in_order(monkeypatch):
    async def body() -> None:
        bench = Bench(monkeypatch, stuck=set())
        bench.put(1)
        bench.put(1)
        await asyncio.sleep(0.02)
        assert len(bench.events) == 2
        assert len(FakeChannel.made) == 1

    asyncio.run(body())
