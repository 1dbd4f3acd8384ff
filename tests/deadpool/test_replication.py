"""Replicas over loopback: what is refused, and what is left when a connection is cut."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

import pytest

from deadpool.arena import ReplicaShelf, checksum
from deadpool.messages import Answer, Offer, Pull
from deadpool.protocol.types import Epoch, Iteration, Member, MemberId, Node, Slot
from deadpool.replication import (
    Channel,
    ReplicaRefused,
    ReplicaServer,
    pull_replica,
    put_replica,
)
from deadpool.wire import WireError

TOKEN = "the job's"
SLOT = Slot(3)
BOUND_S = 60.0
"""Of a whole test: only a hang takes so long."""


class Host:
    """A guardian's shelf behind a replica server, with an epoch that tests set."""

    def __init__(self) -> None:
        self.shelf = ReplicaShelf()
        self.epoch = Epoch(1)
        self.server = ReplicaServer(
            shelf=self.shelf,
            token=TOKEN,
            host="127.0.0.1",
            current_epoch=lambda: self.epoch,
        )
        self.member = Member(
            member=MemberId(1),
            node=Node(1),
            local_rank=0,
            host="127.0.0.1",
            data_port=self.server.port,
        )

    def holds(self) -> set[tuple[int, int]]:
        return set(self.shelf.holdings())


@contextlib.asynccontextmanager
async def hosts(number: int = 1) -> AsyncIterator[list[Host]]:
    running = [Host() for _ in range(number)]
    tasks = [asyncio.create_task(host.server.serve()) for host in running]
    await asyncio.sleep(0)  # A task that has not begun would not close its listener.
    try:
        yield running
    finally:
        channels = [task for host in running for task in host.server._tasks]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, *channels, return_exceptions=True)


def run(test: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Run to its end and see that no descriptor is left."""

    async def bounded() -> None:
        await asyncio.wait_for(test(), BOUND_S)

    before = len(os.listdir("/proc/self/fd"))
    asyncio.run(bounded())
    assert len(os.listdir("/proc/self/fd")) == before


async def put(host: Host, iteration: int, payload: bytes | memoryview, **changes: Any) -> int:
    channel = await Channel.connect(host.member)
    with contextlib.closing(channel):
        given: dict[str, Any] = {
            "token": TOKEN,
            "slot": SLOT,
            "epoch": host.epoch,
            "iteration": Iteration(iteration),
            "payload": memoryview(payload),
            **changes,
        }
        return await put_replica(channel, **given)


async def pull(host: Host, iteration: int) -> bytes:
    replica = await pull_replica(
        host.member, token=TOKEN, slot=SLOT, iteration=Iteration(iteration)
    )
    return bytes(replica.view)


def offer(payload: bytes, iteration: int, **changes: Any) -> Offer:
    given: dict[str, Any] = {
        "token": TOKEN,
        "slot": SLOT,
        "epoch": Epoch(1),
        "iteration": Iteration(iteration),
        "num_bytes": len(payload),
        "checksum": checksum(memoryview(payload)),
        **changes,
    }
    return Offer(**given)


PAYLOAD = os.urandom(3_000_001)


def test_replica_put_and_pulled_comes_back_byte_for_byte() -> None:
    async def test() -> None:
        async with hosts(2) as (first, second):
            assert await put(first, 7, PAYLOAD) == len(PAYLOAD)
            assert await pull(first, 7) == PAYLOAD
            # From one holder to another, as a replacement passes on what it was given.
            assert await put(second, 7, await pull(first, 7)) == len(PAYLOAD)
            assert await pull(second, 7) == PAYLOAD

    run(test)


@pytest.mark.parametrize("size", [0, 1, 4096])
def test_replica_of_any_size_comes_back(size: int) -> None:
    async def test() -> None:
        async with hosts() as (host,):
            await put(host, 1, PAYLOAD[:size])
            assert host.holds() == {(SLOT, 1)}
            assert await pull(host, 1) == PAYLOAD[:size]

    run(test)


def test_replicas_of_three_iterations_leave_the_newest_two() -> None:
    async def test() -> None:
        async with hosts() as (host,):
            for iteration in (1, 2, 3):
                await put(host, iteration, PAYLOAD[iteration : iteration + 1000])
            assert host.holds() == {(SLOT, 2), (SLOT, 3)}
            assert await pull(host, 2) == PAYLOAD[2:1002]
            assert await pull(host, 3) == PAYLOAD[3:1003]

    run(test)


def test_offer_of_what_is_held_sends_no_bytes() -> None:
    async def test() -> None:
        async with hosts() as (host,):
            await put(host, 7, PAYLOAD)
            assert await put(host, 7, PAYLOAD) == 0
            host.epoch = Epoch(2)  # A restored iteration is staged anew in the next epoch.
            assert await put(host, 7, PAYLOAD) == 0

    run(test)


def test_offer_of_other_bytes_for_a_held_iteration_replaces_them() -> None:
    async def test() -> None:
        async with hosts() as (host,):
            await put(host, 7, PAYLOAD[:1000])
            assert await put(host, 7, PAYLOAD[1000:2000]) == 1000
            assert await pull(host, 7) == PAYLOAD[1000:2000]

    run(test)


def test_flipped_byte_on_the_way_is_refused_and_leaves_the_older_replica() -> None:
    async def test() -> None:
        async with hosts() as (host,):
            await put(host, 6, PAYLOAD)

            async def flip() -> None:
                """Memory changes between the checksum and the second half of the bytes."""
                payload[2_000_000] ^= 1

            payload = memoryview(bytearray(PAYLOAD))
            with pytest.raises(ReplicaRefused, match="checksum"):
                await put(host, 7, payload, halfway=flip)
            assert host.holds() == {(SLOT, 6)}
            assert await pull(host, 6) == PAYLOAD

    run(test)


def test_flipped_byte_in_the_holders_memory_is_refused_by_who_pulls() -> None:
    async def test() -> None:
        async with hosts() as (host,):
            await put(host, 7, PAYLOAD)
            kept = host.shelf.find(SLOT, Iteration(7))
            assert kept is not None
            kept.view[99] ^= 1
            with pytest.raises(ReplicaRefused, match="damaged"):
                await pull(host, 7)

    run(test)


@pytest.mark.parametrize("epoch", [0, 2])
def test_offer_of_another_epoch_is_refused_naming_both(epoch: int) -> None:
    async def test() -> None:
        async with hosts() as (host,):
            with pytest.raises(ReplicaRefused, match=f"epoch {epoch}, now is 1"):
                await put(host, 7, PAYLOAD, epoch=Epoch(epoch))
            assert host.holds() == set()

    run(test)


def test_epoch_that_ends_while_bytes_come_in_leaves_no_replica() -> None:
    async def test() -> None:
        async with hosts() as (host,):

            async def next_epoch() -> None:
                host.epoch = Epoch(2)

            with pytest.raises(ReplicaRefused, match="epoch 1 has passed"):
                await put(host, 7, PAYLOAD, halfway=next_epoch)
            assert host.holds() == set()

    run(test)


@pytest.mark.parametrize(
    "message",
    [
        offer(b"12345678", 7, token="another's"),
        Pull(token="another's", slot=SLOT, iteration=Iteration(6)),
        Answer(),
    ],
    ids=["offer", "pull", "no-request"],
)
def test_connection_with_a_wrong_token_or_message_is_closed_and_changes_nothing(
    message: Any,
) -> None:
    async def test() -> None:
        async with hosts() as (host,):
            await put(host, 6, PAYLOAD)
            channel = await Channel.connect(host.member)
            with contextlib.closing(channel):
                await channel.send(message)
                with pytest.raises(WireError):
                    await channel.receive()
            assert host.holds() == {(SLOT, 6)}

    run(test)


def test_garbage_on_the_data_port_is_closed_and_the_next_put_works() -> None:
    async def test() -> None:
        async with hosts() as (host,):
            for garbage in (b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 4096, b"\x03\0\0\0\xc1\xc1\xc1"):
                channel = await Channel.connect(host.member)
                with contextlib.closing(channel):
                    await channel.send_bytes(memoryview(garbage))
                    with pytest.raises(WireError):
                        await channel.receive()
            assert await put(host, 7, PAYLOAD) == len(PAYLOAD)

    run(test)


def test_connection_cut_half_way_leaves_the_older_replica_and_no_half_one() -> None:
    async def test() -> None:
        async with hosts() as (host,):
            await put(host, 6, PAYLOAD)
            for _ in range(3):
                channel = await Channel.connect(host.member)
                with contextlib.closing(channel):
                    assert (await channel.ask(offer(PAYLOAD, 7))).wants_bytes
                    await channel.send_bytes(memoryview(PAYLOAD)[: len(PAYLOAD) // 2])
            await asyncio.gather(*host.server._tasks)
            assert host.holds() == {(SLOT, 6)}
            assert await pull(host, 6) == PAYLOAD
            assert await put(host, 7, PAYLOAD) == len(PAYLOAD)
            assert host.holds() == {(SLOT, 6), (SLOT, 7)}

    run(test)


def test_second_offer_waits_for_the_first_ones_connection_to_end() -> None:
    """An owner that reconnects must not share a buffer with what its old connection still sends."""

    async def test() -> None:
        async with hosts() as (host,):
            old = await Channel.connect(host.member)
            assert (await old.ask(offer(PAYLOAD, 7))).wants_bytes
            again = asyncio.create_task(put(host, 7, PAYLOAD))
            while len(host.server._tasks) < 2:
                await asyncio.sleep(0)
            await old.send_bytes(memoryview(PAYLOAD)[:1000])
            # Long enough for it to end if it did not wait; it cannot end before the old one.
            assert await asyncio.wait({again}, timeout=0.2) == (set(), {again})
            old.close()
            assert await again == len(PAYLOAD)
            assert await pull(host, 7) == PAYLOAD

    run(test)


def test_pull_of_what_is_not_held_is_refused_naming_it() -> None:
    async def test() -> None:
        async with hosts() as (host,):
            await put(host, 6, PAYLOAD)
            with pytest.raises(ReplicaRefused, match="slot 3 at iteration 7"):
                await pull(host, 7)

    run(test)


def test_pull_after_rollback_finds_only_what_is_not_past_it() -> None:
    async def test() -> None:
        async with hosts() as (host,):
            await put(host, 6, PAYLOAD)
            await put(host, 7, PAYLOAD[:-1] + b"\0")
            host.shelf.invalidate_after(Iteration(6))
            assert host.holds() == {(SLOT, 6)}
            with pytest.raises(ReplicaRefused):
                await pull(host, 7)
            assert await pull(host, 6) == PAYLOAD

    run(test)


def test_connect_where_nobody_listens_raises_wire_error_naming_the_node() -> None:
    async def test() -> None:
        async with hosts() as (host,):
            pass
        with pytest.raises(WireError, match="node 1"):
            await Channel.connect(host.member)

    run(test)
