"""The coordinator over loopback, with guardians that say what tests want and strangers."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from deadpool import coordinator as coordinator_module
from deadpool import messages as m
from deadpool.config import parse_config
from deadpool.coordinator import Coordinator
from deadpool.protocol.placement import Grid
from deadpool.protocol.types import Epoch, Holdings, Iteration, Node, Phase, Slot
from deadpool.wire import WireError, read_message, write_message

TOKEN = "the job's"
BOUND_S = 60.0
GRID = Grid(
    world_size=2, ranks_per_node=1, tensor=1, context=1, pipeline=1, pipeline_before_data=False
)

NOTHING = Holdings(own=frozenset(), replicas=frozenset())


class Guardian:
    """A connection to the coordinator."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    @classmethod
    async def connect(cls, address: tuple[str, int]) -> Guardian:
        return cls(*await asyncio.open_connection(*address))

    def tell(self, message: m.Message) -> None:
        write_message(self.writer, message)

    async def hear(self, kind: type) -> Any:
        message = await read_message(self.reader)
        assert isinstance(message, kind), message
        return message

    async def hears_end_of_stream(self) -> bool:
        try:
            return await self.reader.read() == b""
        except ConnectionError:
            return True

    def close(self) -> None:
        self.writer.close()


def hello(node: int, token: str = TOKEN) -> m.Hello:
    return m.Hello(token=token, node=node, local_rank=0, host="127.0.0.1", data_port=9)


class Job:
    """A coordinator of two slots and one spare, whose guardians are `nodes`."""

    def __init__(self, coordinator: Coordinator, address: tuple[str, int]) -> None:
        self.coordinator = coordinator
        self.address = address
        self.nodes: list[Guardian] = []
        self.fenced: list[Node] = []

    async def connect(self) -> Guardian:
        return await Guardian.connect(self.address)

    async def join(self, node: int) -> Guardian:
        guardian = await self.connect()
        guardian.tell(hello(node))
        await guardian.hear(m.Welcome)
        self.nodes.append(guardian)
        return guardian

    async def start_training(self) -> None:
        for node in range(3):
            await self.join(node)
        await self.go_through_epoch(1, self.nodes[:2], NOTHING)
        for guardian in self.nodes[:2]:
            guardian.tell(m.Staged(epoch=Epoch(1), iteration=Iteration(0)))
        for guardian in self.nodes[:2]:
            assert (await guardian.hear(m.Committed)).iteration == 0

    async def go_through_epoch(
        self, epoch: int, active: list[Guardian], *holdings: Holdings
    ) -> Any:
        """From the abort to training; returns the plan."""
        for guardian, held in zip(active, holdings * len(active), strict=False):
            abort = await guardian.hear(m.Abort)
            assert abort.epoch == epoch
            port = 4711 if abort.opens_store else 0
            guardian.tell(m.Aborted(epoch=abort.epoch, store_port=port, holdings=held))
        plans = [(await guardian.hear(m.NewPlan)).plan for guardian in active]
        assert all(plan == plans[0] for plan in plans) and plans[0].store_port == 4711
        for guardian in active:
            guardian.tell(
                m.Ready(
                    epoch=Epoch(epoch),
                    seconds={"restore": 0.5, "transfer": 0.5},
                    num_bytes=1 << 20,
                    iterations_rerun=1,
                )
            )
        for guardian in active:
            assert (await guardian.hear(m.Resume)).epoch == epoch
        return plans[0]

    async def check_undisturbed(self) -> None:
        """It still trains in epoch 1, with the members it had, and commits."""
        leader = self.coordinator._leader
        assert (leader.phase, leader.epoch) == (Phase.TRAINING, 1)
        assert sorted(leader.members) == [1, 2, 3] and self.fenced == []
        assert leader.committed is not None
        following = Iteration(leader.committed + 1)
        for guardian in self.nodes[:2]:
            guardian.tell(m.Staged(epoch=Epoch(1), iteration=following))
        for guardian in self.nodes[:2]:
            assert (await guardian.hear(m.Committed)).iteration == following


@contextlib.asynccontextmanager
async def job(*flags: str) -> AsyncIterator[Job]:
    config, _ = parse_config(flags)
    fenced: list[Node] = []
    coordinator = Coordinator(
        config=config, grid=GRID, num_spare_nodes=1, token=TOKEN, fence=fenced.append
    )
    running = Job(coordinator, await coordinator.listen("127.0.0.1"))
    running.fenced = fenced
    try:
        yield running
    finally:
        await coordinator.close()
        for guardian in running.nodes:
            guardian.close()


def run(test: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """To its end; an error in any task of the loop fails the test."""
    errors: list[Any] = []

    async def bounded() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, about: errors.append(about))
        await asyncio.wait_for(test(), BOUND_S)

    asyncio.run(bounded())
    assert errors == []


STRANGERS = {
    "wrong token": m.encode(hello(0, token="guessed")),
    "empty token": m.encode(hello(0, token="")),
    "token beyond ASCII": m.encode(hello(0, token="gu\N{LATIN SMALL LETTER E WITH ACUTE}")),
    "no hello": m.encode(m.TrainerLost(reason="?")),
    "http": b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "endless": b"\xff\xff\xff\xff" + b"x" * 1000,
    "not msgpack": b"\x04\0\0\0\xc1\xc1\xc1\xc1",
}


@pytest.mark.parametrize("sent", STRANGERS.values(), ids=STRANGERS)
def test_stranger_is_refused_without_an_answer_and_the_job_goes_on(sent: bytes) -> None:
    async def test() -> None:
        async with job() as running:
            await running.start_training()
            stranger = await running.connect()
            stranger.writer.write(sent)
            assert await stranger.hears_end_of_stream()
            stranger.close()
            await running.check_undisturbed()

    run(test)


@pytest.mark.parametrize("sent", [b"", b"\x20\0\0", b"\x20\0\0\0half"])
def test_stranger_that_hangs_up_early_leaves_the_job_alone(sent: bytes) -> None:
    async def test() -> None:
        async with job() as running:
            await running.start_training()
            stranger = await running.connect()
            stranger.writer.write(sent)
            stranger.writer.write_eof()
            assert await stranger.hears_end_of_stream()
            stranger.close()
            await running.check_undisturbed()

    run(test)


def test_stranger_that_says_nothing_is_sent_away(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(coordinator_module, "_HELLO_TIMEOUT_S", 0.01)

    async def test() -> None:
        async with job() as running:
            stranger = await running.connect()
            assert await stranger.hears_end_of_stream()
            stranger.close()
            monkeypatch.undo()
            await running.start_training()
            await running.check_undisturbed()

    with caplog.at_level(logging.WARNING):
        run(test)
    assert "said nothing" in caplog.text


def test_stranger_does_not_count_as_a_member_while_the_job_forms() -> None:
    async def test() -> None:
        async with job() as running:
            await running.join(0)
            await running.join(1)
            stranger = await running.connect()
            stranger.tell(hello(2, token="guessed"))
            assert await stranger.hears_end_of_stream()
            stranger.close()
            assert running.coordinator._leader.phase is Phase.FORMING
            await running.join(2)
            assert (await running.nodes[0].hear(m.Abort)).opens_store
            assert not (await running.nodes[1].hear(m.Abort)).opens_store

    run(test)


def test_guardian_whose_connection_ends_is_fenced_and_its_slot_moves(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async def test() -> None:
        async with job("--deadpool-log-dir", str(tmp_path)) as running:
            await running.start_training()
            running.nodes[1].close()
            active = [running.nodes[0], running.nodes[2]]
            survivor = Holdings(
                own=frozenset({Iteration(0)}), replicas=frozenset({(Slot(1), Iteration(0))})
            )
            plan = await running.go_through_epoch(2, active, survivor, NOTHING)
            assert running.fenced == [1]
            assert [member.node for member in plan.slots] == [0, 2]
            assert (plan.replaced, plan.restore, plan.sources) == ((1,), 0, ((1, 1),))
            for guardian in active:
                guardian.tell(m.FirstStep(epoch=Epoch(2), iteration=Iteration(1), seconds=0.25))
                guardian.tell(m.Finished(epoch=Epoch(2)))
            assert await running.coordinator.wait_end() == (0, "")

    run(test)
    (record,) = map(json.loads, (tmp_path / "events.jsonl").read_text().splitlines())
    assert (record["event"], record["epoch"]) == ("swap", 2)
    lines = [line for line in capsys.readouterr().out.splitlines() if "epoch 2" in line]
    assert len(lines) == 1


def test_guardian_that_talks_nonsense_after_its_hello_is_lost() -> None:
    async def test() -> None:
        async with job() as running:
            await running.start_training()
            running.nodes[1].writer.write(b"\x04\0\0\0\xc1\xc1\xc1\xc1")
            assert (await running.nodes[0].hear(m.Abort)).epoch == 2
            assert running.fenced == [1]

    run(test)


def test_guardian_reporting_its_trainers_death_is_lost() -> None:
    async def test() -> None:
        async with job() as running:
            await running.start_training()
            running.nodes[0].tell(m.TrainerLost(reason="signal 9"))
            assert (await running.nodes[1].hear(m.Abort)).opens_store
            assert running.fenced == [0]

    run(test)


def test_failed_trainer_ends_the_job_for_everybody_with_its_code() -> None:
    async def test() -> None:
        async with job() as running:
            await running.start_training()
            running.nodes[1].tell(m.Failed(reason="loss is NaN", exit_code=9))
            for guardian in running.nodes:
                end = await guardian.hear(m.End)
                assert end.exit_code == 9 and "loss is NaN" in end.reason
            code, reason = await running.coordinator.wait_end()
            assert code == 9 and "node 1" in reason

    run(test)


def test_start_that_takes_too_long_ends_saying_how_many_came() -> None:
    async def test() -> None:
        async with job("--deadpool-start-timeout", "0.05") as running:
            code, reason = await running.coordinator.wait_end()
            assert code == 5 and "0 of 3" in reason

    run(test)


def test_drain_reaches_every_guardian_spares_too() -> None:
    async def test() -> None:
        async with job() as running:
            await running.start_training()
            running.coordinator.drain()
            for guardian in running.nodes:
                await guardian.hear(m.Drain)

    run(test)


def test_end_from_outside_tells_everybody_and_comers_are_sent_home() -> None:
    async def test() -> None:
        async with job() as running:
            await running.start_training()
            running.coordinator.end(130, "interrupted")
            for guardian in running.nodes:
                assert (await guardian.hear(m.End)).exit_code == 130
            late = await running.join(7)
            assert (await late.hear(m.End)).exit_code == 0
            assert await running.coordinator.wait_end() == (130, "interrupted")
            assert running.coordinator.is_over

    run(test)


def test_close_ends_every_connection() -> None:
    async def test() -> None:
        async with job() as running:
            await running.start_training()
            await running.coordinator.close()
            for guardian in running.nodes:
                with pytest.raises(WireError):
                    await read_message(guardian.reader)
            with pytest.raises(OSError):
                await running.connect()

    run(test)
