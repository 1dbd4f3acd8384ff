"""Replicas by MPI sidecars: the same bytes, the same refusals, and TCP when the world is lost."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

import psutil
import pytest

from deadpool.arena import Arena, ReplicaShelf
from deadpool.mpi import frames
from deadpool.mpi.bridge import Bridge
from deadpool.mpi.world import Launcher, World, find_launcher
from deadpool.protocol.events import AnswerOffer, AnswerPull, Offered, Received
from deadpool.protocol.types import Epoch, Iteration, Member, MemberId, Node, Slot
from deadpool.replication import ReplicaServer, put_replica

LAUNCHER = find_launcher(None, {})
needs_mpi = pytest.mark.skipif(isinstance(LAUNCHER, str), reason=str(LAUNCHER))

TOKEN = b"the job's token, at least this long"
EPOCH = Epoch(5)
BOUND_S = 90.0
"""Of a whole test: only a hang takes so long."""
PAYLOAD_BYTES = 3 * frames.CHUNK_BYTES + 4097


class Guardian:
    """One slot's arena, shelf, server and bridge, and decisions like the core's: buffer 0, checked
    and of the epoch."""

    def __init__(self, slot: int, key: bytes, num_bytes: int) -> None:
        self.slot = Slot(slot)
        self.shelf = ReplicaShelf()
        self.arena = Arena.create()
        self.arena.resize(num_bytes)
        self.staged: list[tuple[Slot, Iteration]] = []
        self.server = ReplicaServer(
            shelf=self.shelf,
            token=TOKEN,
            host="127.0.0.1",
            offered=self.offered,
            received=self.received,
            asked=lambda event: AnswerPull(buffer=None, refusal="a test"),
            damaged=lambda event: None,
        )
        self.up = asyncio.Event()
        self.ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.bridge = Bridge(
            key=key,
            slot=self.slot,
            serve=self.server.serve_channel,
            start=asyncio.get_running_loop().create_task,
            up=lambda library: self.up.set(),
            ended=self.ended.set_result,
        )
        self.member = member(slot, self.server.port)

    def offered(self, event: Offered) -> AnswerOffer:
        if event.epoch != EPOCH:
            return AnswerOffer(buffer=None, refusal=f"epoch {event.epoch}, now is {EPOCH}")
        return AnswerOffer(buffer=0, refusal="")

    def received(self, event: Received) -> AnswerOffer:
        if event.checksum != event.announced:
            return AnswerOffer(buffer=None, refusal="checksum")
        self.staged.append((event.slot, event.iteration))
        return AnswerOffer(buffer=None, refusal="")

    def fill(self, seed: int) -> bytes:
        payload = self.arena.payload(0)
        pattern = bytes((seed + k * k) % 251 for k in range(4099))
        payload[:] = (pattern * (len(payload) // len(pattern) + 1))[: len(payload)]
        return bytes(payload)

    async def put(self, holder: Slot, iteration: int, **changes: Any) -> int:
        given: dict[str, Any] = {
            "slot": self.slot,
            "epoch": EPOCH,
            "iteration": Iteration(iteration),
            "payload": self.arena.payload(0),
            **changes,
        }
        return await put_replica(self.bridge.channel_to(holder), **given)


def member(slot: int, data_port: int = 1, host: str = "127.0.0.1") -> Member:
    return Member(
        member=MemberId(100 + slot),
        node=Node(slot),
        local_rank=0,
        host=host,
        control_port=1,
        data_port=data_port,
    )


@contextlib.asynccontextmanager
async def guardians(number: int, num_bytes: int = PAYLOAD_BYTES) -> AsyncIterator[list[Guardian]]:
    """With an MPI world that is up."""
    assert isinstance(LAUNCHER, Launcher)
    key = frames.world_key(TOKEN, EPOCH)
    running = [Guardian(slot, key, num_bytes) for slot in range(number)]
    servers = [asyncio.create_task(each.server.serve()) for each in running]
    for each in running:
        each.bridge.open()
    one_world = World(LAUNCHER, [each.member for each in running], key)
    launched = asyncio.create_task(one_world.run())
    try:
        ups = asyncio.gather(*(each.up.wait() for each in running))
        await asyncio.wait([asyncio.ensure_future(ups), launched], return_when="FIRST_COMPLETED")
        assert not launched.done(), launched.result()
        yield running
    finally:
        for each in running:
            each.bridge.close()
        one_world.stop()
        await launched
        for server in servers:
            server.cancel()
        await asyncio.gather(*servers, return_exceptions=True)


def sidecars() -> list[psutil.Process]:
    below = psutil.Process().children(recursive=True)
    return [p for p in below if "deadpool.mpi.sidecar" in " ".join(_cmdline(p))]


def _cmdline(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []


def run(test: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Run to its end and see that no task, process or shared memory is left."""

    async def bounded() -> None:
        await asyncio.wait_for(test(), BOUND_S)
        others = asyncio.all_tasks() - {asyncio.current_task()}
        if others:
            await asyncio.wait(others, timeout=20)
        assert asyncio.all_tasks() == {asyncio.current_task()}

    before = set(os.listdir("/dev/shm"))
    asyncio.run(bounded())
    left = psutil.Process().children(recursive=True)
    gone, alive = psutil.wait_procs(left, timeout=10)
    assert not sidecars() and not alive, alive
    assert set(os.listdir("/dev/shm")) <= before


@needs_mpi
@pytest.mark.parametrize("num_bytes", [1, 5000, frames.CHUNK_BYTES, PAYLOAD_BYTES])
def test_replica_by_sidecars_equals_the_source(num_bytes):
    async def test() -> None:
        async with guardians(2, num_bytes) as (first, second):
            sources = [each.fill(each.slot + 3) for each in (first, second)]
            # Both ways at once, as in a ring of two; then again into the same memory.
            for iteration in (7, 8):
                moved = await asyncio.gather(
                    first.put(second.slot, iteration), second.put(first.slot, iteration)
                )
                assert moved == [num_bytes, num_bytes]
            assert bytes(second.shelf.view(first.slot, 0)) == sources[0]
            assert bytes(first.shelf.view(second.slot, 0)) == sources[1]

    run(test)
