"""What a guardian moves in an epoch ends with the epoch, also where a cancellation is swallowed."""

from __future__ import annotations

import asyncio
import dataclasses
from typing import Any

import pytest

from deadpool import integrity, transfers
from deadpool import messages as m
from deadpool.arena import Arena
from deadpool.injection import Injector
from deadpool.integrity import Manifest
from deadpool.protocol import events as e
from deadpool.protocol.types import (
    Epoch,
    Iteration,
    Member,
    MemberId,
    Node,
    Plan,
    Restart,
    Slot,
)
from deadpool.replication import ReplicaRefused, SnapshotDamaged

SIZE = 1000

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
        self.arena.resize(SIZE)
        for iteration in (2, 3):
            self.arena.payload(iteration % 2)[:] = bytes([iteration]) * SIZE
            self.arena.label(iteration % 2, Slot(0), Iteration(iteration))
        self.told: list[m.Message] = []

        async def put_replica(channel: Any, *, epoch: Epoch, **more: Any) -> None:
            self.puts.append((epoch, channel))
            sums = await integrity.sum_chunks(more["payload"])
            if more["known"] is None:
                more["summed"](
                    Manifest.of(
                        slot=more["slot"], iteration=more["iteration"], num_bytes=SIZE, sums=sums
                    )
                )
            elif flaw := more["known"].flaw(more["slot"], more["iteration"], sums):
                raise SnapshotDamaged(flaw)
            if epoch in stuck:
                try:
                    await asyncio.Event().wait()
                except asyncio.CancelledError:
                    raise ReplicaRefused(f"epoch {epoch} has passed") from None

        monkeypatch.setattr(transfers, "TcpChannel", FakeChannel)
        monkeypatch.setattr(transfers, "put_replica", put_replica)
        monkeypatch.setattr(transfers, "_RETRY_S", 0.001)
        self.transfers = transfers.Transfers(
            arena=self.arena,
            token=b"token",
            injector=Injector((), 0, None),
            feed=self.events.append,
            damaged=self.events.append,
            tell_trainer=self.told.append,
            start=asyncio.get_running_loop().create_task,
        )

    def put(self, epoch: int, iteration: int = 3) -> None:
        self.transfers.put(
            e.Put(
                epoch=Epoch(epoch), iteration=Iteration(iteration), slot=Slot(0), holders=(HOLDER,)
            )
        )

    def adopt(self, epoch: int, restore: int = 3) -> None:
        restart = Restart(
            restore=Iteration(restore), replaced=(), sources=(), store_slot=Slot(0), store_port=1
        )
        plan = Plan(epoch=Epoch(epoch), slots=(HOLDER,), holders=(Slot(0),), restart=restart)
        self.transfers.adopt(e.AdoptPlan(plan=plan, slot=Slot(0), source=None))

    async def ask(self, epoch: int, *, is_live: bool) -> None:
        """The trainer asks for iteration 3; until there is an answer or the epoch fails."""
        before = len(self.told) + len(self.failed)
        self.transfers.deliver(
            m.SnapshotWanted(epoch=Epoch(epoch), iteration=Iteration(3), is_live=is_live)
        )
        while len(self.told) + len(self.failed) == before:
            await asyncio.sleep(0)

    @property
    def failed(self) -> list[str]:
        return [event.reason for event in self.events if isinstance(event, e.FetchFailed)]

    @property
    def damaged(self) -> list[tuple[int, int]]:
        found = [event for event in self.events if isinstance(event, e.Damaged)]
        return [(event.slot, event.iteration) for event in found]

    def flip(self, what: str) -> None:
        """Of iteration 3."""
        kept = self.transfers._manifests[Iteration(3)]
        match what.split():
            case ["payload", place]:
                self.arena.payload(1)[int(place)] ^= 1
            case ["header", place]:
                self.arena.header(1)[int(place)] ^= 1
            case ["sum", place]:
                sums = list(kept.sums)
                sums[int(place)] ^= 1
                changed = dataclasses.replace(kept, sums=tuple(sums))
                self.transfers._manifests[Iteration(3)] = changed
            case ["root"]:
                changed = dataclasses.replace(kept, root=kept.root ^ 1)
                self.transfers._manifests[Iteration(3)] = changed


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


# Own snapshots that are damaged

FLIPS = [
    *("payload 0", "payload 500", "payload 999"),
    *("header 0", "header 9", "header 16", "header 25"),
    *("sum 0", "sum 2", "root"),
]


@pytest.fixture(autouse=True)
def three_chunks(monkeypatch):
    monkeypatch.setattr(integrity, "CHUNK_BYTES", 400)


async def staged(monkeypatch) -> Bench:
    """Iterations 2 and 3 were captured, and sent in epoch 1."""
    bench = Bench(monkeypatch, stuck=set())
    for iteration in (2, 3):
        bench.put(1, iteration)
    while len(bench.events) < 2:
        await asyncio.sleep(0)
    bench.events.clear()
    bench.transfers.cancel()
    return bench


def test_own_snapshot_as_it_was_is_given_to_the_trainer(monkeypatch):
    async def body() -> None:
        bench = await staged(monkeypatch)
        assert await bench.transfers.own(None) == {2, 3}
        bench.adopt(2)
        await bench.ask(2, is_live=False)
        (here,) = bench.told
        assert here.buffer == 1 and not bench.events

    asyncio.run(body())


@pytest.mark.parametrize("is_live", [True, False])
@pytest.mark.parametrize("what", FLIPS)
def test_own_snapshot_flipped_before_the_plan_is_dropped_and_its_epoch_fails_or_it_is_retaken(
    monkeypatch, what, is_live
):
    async def body() -> None:
        bench = await staged(monkeypatch)
        assert await bench.transfers.own(None) == {2, 3}
        bench.flip(what)
        bench.adopt(2)
        await bench.ask(2, is_live=is_live)
        if is_live:
            assert [here.buffer for here in bench.told] == [None] and not bench.failed
            bench.arena.payload(1)[:] = bytes([3]) * SIZE  # The trainer takes it anew.
            bench.arena.label(1, Slot(0), Iteration(3))
            await bench.ask(2, is_live=False)
            assert [here.buffer for here in bench.told] == [None, 1] and not bench.failed
        else:
            assert len(bench.failed) == 1 and "slot 0" in bench.failed[0] and not bench.told
            bench.transfers.cancel()
            assert await bench.transfers.own(None) == {2}
            assert await bench.transfers.own(Iteration(3)) == {2, 3}
            assert bench.damaged == [(0, 3)]

    asyncio.run(body())


@pytest.mark.parametrize("what", [flip for flip in FLIPS if flip.startswith("header")])
def test_own_header_flipped_is_said_and_left_out_of_what_is_held(monkeypatch, what):
    async def body() -> None:
        bench = await staged(monkeypatch)
        bench.flip(what)
        assert await bench.transfers.own(None) == {2}
        assert bench.damaged == [(0, 3)]
        assert await bench.transfers.own(None) == {2}
        assert bench.damaged == [(0, 3)]  # Once.

    asyncio.run(body())


@pytest.mark.parametrize("what", [flip for flip in FLIPS if not flip.startswith("header")])
def test_check_that_its_epoch_outlives_is_waited_for_by_the_next(monkeypatch, what):
    async def body() -> None:
        bench = await staged(monkeypatch)
        bench.flip(what)
        bench.adopt(2)
        bench.transfers.cancel()
        assert await bench.transfers.own(None) == {2}
        assert bench.damaged == [(0, 3)] and not bench.failed

    asyncio.run(body())


@pytest.mark.parametrize("what", FLIPS)
def test_own_snapshot_flipped_is_not_staged_at_a_new_holder(monkeypatch, what):
    async def body() -> None:
        bench = await staged(monkeypatch)
        bench.flip(what)
        bench.put(2)
        while not bench.failed:
            await asyncio.sleep(0)
        bench.transfers.cancel()
        assert await bench.transfers.own(None) == {2}
        assert bench.damaged == [(0, 3)]
        assert not any(isinstance(event, e.PutDone) for event in bench.events)

    asyncio.run(body())


def test_own_snapshot_never_sent_gets_its_sums_when_it_is_needed(monkeypatch):
    async def body() -> None:
        bench = Bench(monkeypatch, stuck=set())
        bench.adopt(2)
        await bench.ask(2, is_live=False)
        assert [here.buffer for here in bench.told] == [1]
        assert bench.transfers._manifests.keys() == {3}
        bench.flip("payload 1")
        bench.transfers.cancel()
        bench.adopt(3)
        await bench.ask(3, is_live=False)
        assert len(bench.failed) == 1

    asyncio.run(body())


def test_iteration_run_again_gets_new_sums(monkeypatch):
    async def body() -> None:
        bench = await staged(monkeypatch)
        bench.adopt(2, restore=2)
        bench.arena.payload(1)[:] = bytes([9]) * SIZE
        bench.arena.label(1, Slot(0), Iteration(3))
        bench.put(2)
        while not bench.events:
            await asyncio.sleep(0)
        assert bench.events == [e.PutDone(epoch=Epoch(2), iteration=Iteration(3))]

    asyncio.run(body())
