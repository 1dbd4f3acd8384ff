"""Replicas over loopback: what is refused, and what is left when a connection is cut."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import gc
import os
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

import pytest

from deadpool import integrity, replication
from deadpool import messages as m
from deadpool.arena import ReplicaShelf
from deadpool.integrity import Manifest, checksum, chunks
from deadpool.messages import Answer, Offer
from deadpool.protocol.events import AnswerOffer, AnswerPull, Asked, Damaged, Offered, Received
from deadpool.protocol.snapshots import NUM_BUFFERS
from deadpool.protocol.types import Epoch, Iteration, Member, MemberId, Node, Slot
from deadpool.replication import (
    ReplicaRefused,
    ReplicaServer,
    SnapshotDamaged,
    TcpChannel,
    pull_replica,
    put_replica,
)
from deadpool.wire import WireError

TOKEN = b"the job's"
SLOT = Slot(3)
BOUND_S = 60.0
"""Of a whole test: only a hang takes so long."""


class Host:
    """A guardian's shelf behind a replica server, with an epoch that tests set and decisions like
    the core's: two buffers, the newest kept."""

    def __init__(self, handshake_timeout_s: float = 30.0) -> None:
        self.shelf = ReplicaShelf()
        self.epoch = Epoch(1)
        self.held: dict[tuple[Slot, int], tuple[int, int, int]] = {}
        """Iteration, num_bytes and checksum by slot and buffer."""
        self.asked_with: list[Offered | Received | Asked | Damaged] = []
        self.server = ReplicaServer(
            shelf=self.shelf,
            token=TOKEN,
            host="127.0.0.1",
            offered=self.offered,
            received=self.received,
            asked=self.asked,
            damaged=self.damaged,
            handshake_timeout_s=handshake_timeout_s,
        )
        self.member = Member(
            member=MemberId(1),
            node=Node(1),
            local_rank=0,
            host="127.0.0.1",
            control_port=1,
            data_port=self.server.port,
        )

    def offered(self, event: Offered) -> AnswerOffer:
        self.asked_with.append(event)
        if event.epoch != self.epoch:
            return AnswerOffer(buffer=None, refusal=f"epoch {event.epoch}, now is {self.epoch}")
        if (event.iteration, event.num_bytes, event.checksum) in self.held.values():
            return AnswerOffer(buffer=None, refusal="")
        keys = [(event.slot, buffer) for buffer in range(NUM_BUFFERS)]
        key = min(keys, key=lambda key: self.held.get(key, (-1,))[0])
        self.held.pop(key, None)
        return AnswerOffer(buffer=key[1], refusal="")

    def received(self, event: Received) -> AnswerOffer:
        self.asked_with.append(event)
        if event.epoch != self.epoch:
            return AnswerOffer(buffer=None, refusal=f"epoch {event.epoch} has passed")
        if event.checksum != event.announced:
            return AnswerOffer(buffer=None, refusal="checksum")
        self.held[event.slot, event.buffer] = (event.iteration, event.num_bytes, event.checksum)
        return AnswerOffer(buffer=None, refusal="")

    def asked(self, event: Asked) -> AnswerPull:
        self.asked_with.append(event)
        for (slot, buffer), (iteration, _, _) in self.held.items():
            if (slot, iteration, event.epoch) == (event.slot, event.iteration, self.epoch):
                return AnswerPull(buffer=buffer, refusal="")
        return AnswerPull(buffer=None, refusal=f"no iteration {event.iteration} here")

    def damaged(self, event: Damaged) -> None:
        self.asked_with.append(event)
        self.held = {
            (slot, buffer): kept
            for (slot, buffer), kept in self.held.items()
            if (slot, kept[0]) != (event.slot, event.iteration)
        }

    def holds(self) -> set[tuple[int, int]]:
        return {(slot, iteration) for (slot, _), (iteration, _, _) in self.held.items()}


@contextlib.asynccontextmanager
async def hosts(number: int = 1, handshake_timeout_s: float = 30.0) -> AsyncIterator[list[Host]]:
    running = [Host(handshake_timeout_s) for _ in range(number)]
    tasks = [asyncio.create_task(host.server.serve()) for host in running]
    await asyncio.sleep(0)  # A task that has not begun would not close its listener.
    try:
        yield running
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for host in running:
            host.shelf.close()


def run(test: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Run to its end and see that no task and no descriptor is left."""

    async def bounded() -> None:
        await asyncio.wait_for(test(), BOUND_S)
        assert asyncio.all_tasks() == {asyncio.current_task()}

    gc.collect()  # Other tests' memory.
    before = len(os.listdir("/proc/self/fd"))
    asyncio.run(bounded())
    gc.collect()  # Views of replicas in the tracebacks of cut connections.
    assert len(os.listdir("/proc/self/fd")) == before


async def connect(host: Host) -> TcpChannel:
    return await TcpChannel.connect(host.member, token=TOKEN, timeout_s=30.0)


async def put(host: Host, iteration: int, payload: bytes | memoryview, **changes: Any) -> int:
    with contextlib.closing(await connect(host)) as channel:
        return await put_on(channel, host, iteration, payload, **changes)


async def put_on(
    channel: TcpChannel, host: Host, iteration: int, payload: bytes | memoryview, **changes: Any
) -> int:
    given: dict[str, Any] = {
        "slot": SLOT,
        "epoch": host.epoch,
        "iteration": Iteration(iteration),
        "payload": memoryview(payload),
        **changes,
    }
    return await put_replica(channel, **given)


async def pull(host: Host, iteration: int) -> bytes:
    replica = await pull_replica(
        host.member, token=TOKEN, slot=SLOT, epoch=host.epoch, iteration=Iteration(iteration)
    )
    return bytes(replica.view)


def offer(payload: bytes, iteration: int, **changes: Any) -> Offer:
    given: dict[str, Any] = {
        "slot": SLOT,
        "epoch": Epoch(1),
        "iteration": Iteration(iteration),
        "num_bytes": len(payload),
        "checksum": None,
        **changes,
    }
    return Offer(**given)


PAYLOAD = os.urandom(3_000_001)


@pytest.fixture(autouse=True, params=[16 << 20, 1 << 20], ids=["one chunk", "three chunks"])
def chunk_bytes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(integrity, "CHUNK_BYTES", request.param)
    return request.param


def manifest_of(payload: bytes, iteration: int) -> Manifest:
    sums = [checksum(chunk) for chunk in chunks(memoryview(payload))]
    return Manifest.of(slot=SLOT, iteration=Iteration(iteration), num_bytes=len(payload), sums=sums)


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


def test_callbacks_are_told_what_was_offered_received_and_asked() -> None:
    async def test() -> None:
        async with hosts() as (host,):
            await put(host, 7, PAYLOAD)
            await pull(host, 7)
            given = manifest_of(PAYLOAD, 7).root
            same: dict[str, Any] = {
                "slot": SLOT, "epoch": Epoch(1), "iteration": Iteration(7)
            }  # fmt: skip
            assert host.asked_with == [
                Offered(num_bytes=len(PAYLOAD), checksum=None, **same),
                Received(buffer=0, num_bytes=len(PAYLOAD), checksum=given, announced=given, **same),
                Asked(**same),
            ]

    run(test)


def test_one_channel_takes_replica_after_replica_and_goes_on_after_a_refusal() -> None:
    async def test() -> None:
        async with hosts() as (host,):
            with contextlib.closing(await connect(host)) as channel:
                for iteration in (1, 2, 3):
                    await put_on(channel, host, iteration, PAYLOAD[iteration : iteration + 1000])
                with pytest.raises(ReplicaRefused, match="epoch 9, now is 1"):
                    await put_on(channel, host, 4, PAYLOAD, epoch=Epoch(9))
                await put_on(channel, host, 4, PAYLOAD[4:1004])
            assert host.holds() == {(SLOT, 3), (SLOT, 4)}
            assert await pull(host, 3) == PAYLOAD[3:1003]
            assert await pull(host, 4) == PAYLOAD[4:1004]

    run(test)


def test_offer_of_what_is_held_sends_no_bytes() -> None:
    async def test() -> None:
        async with hosts() as (host,):
            summed: list[Manifest] = []
            await put(host, 7, PAYLOAD, summed=summed.append)
            assert summed == [manifest_of(PAYLOAD, 7)]
            assert await put(host, 7, PAYLOAD, known=summed[0]) == 0
            host.epoch = Epoch(2)  # A restored iteration is staged anew in the next epoch.
            assert await put(host, 7, PAYLOAD, known=summed[0]) == 0

    run(test)


def test_replica_of_another_size_takes_the_buffer() -> None:
    async def test() -> None:
        async with hosts() as (host,):
            for iteration, size in ((1, 1000), (2, 1000), (3, 2000), (4, 10)):
                await put(host, iteration, PAYLOAD[:size])
            assert await pull(host, 3) == PAYLOAD[:2000]
            assert await pull(host, 4) == PAYLOAD[:10]
            assert host.shelf.num_bytes == 2010

    run(test)


# Damage

PLACES = [0, 1_500_000, 3_000_000]
"""First, middle and last chunk."""


class FlippingChannel(TcpChannel):
    """One bit of what is sent is flipped on the way: at byte `place` of the payload, or in the
    checksum behind it (None). Everything else is as sent."""

    place: int | None
    sent: int

    async def send_bytes(self, view: memoryview) -> None:
        if self.place is not None and len(view) > 1000:
            if self.sent <= self.place < self.sent + len(view):
                view = memoryview(bytearray(view))
                view[self.place - self.sent] ^= 4
            self.sent += len(view)
        await super().send_bytes(view)

    async def send(self, message: m.Message) -> None:
        if isinstance(message, m.Sealed) and self.place is None:
            message = m.Sealed(checksum=message.checksum ^ 4)
        await super().send(message)


@pytest.mark.parametrize("place", [*PLACES, None])
def test_flipped_bit_on_the_way_to_the_holder_is_refused_and_leaves_the_older_replica(
    place: int | None,
) -> None:
    async def test() -> None:
        async with hosts() as (host,):
            await put(host, 6, PAYLOAD)
            with contextlib.closing(await connect(host)) as channel:
                channel.__class__ = FlippingChannel
                channel.place, channel.sent = place, 0  # type: ignore[attr-defined]
                with pytest.raises(ReplicaRefused, match="checksum"):
                    await put_on(channel, host, 7, PAYLOAD)
                assert host.holds() == {(SLOT, 6)}
                channel.__class__ = TcpChannel
                await put_on(channel, host, 7, PAYLOAD)  # Sent again, it is as it was.
            assert await pull(host, 7) == PAYLOAD
            assert await pull(host, 6) == PAYLOAD

    run(test)


@pytest.mark.parametrize("place", PLACES)
def test_flipped_bit_on_the_way_to_who_pulls_is_found_there_and_the_replica_kept(
    place: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test() -> None:
        async with hosts() as (host,):
            await put(host, 7, PAYLOAD)
            FlippingChannel.place, FlippingChannel.sent = place, 0
            monkeypatch.setattr(replication, "TcpChannel", FlippingChannel)
            with pytest.raises(WireError, match="damaged on the way"):
                await pull(host, 7)
            monkeypatch.setattr(replication, "TcpChannel", TcpChannel)
            assert await pull(host, 7) == PAYLOAD
            assert not [x for x in host.asked_with if isinstance(x, Damaged)]

    run(test)


@pytest.mark.parametrize("place", PLACES)
def test_flipped_bit_in_the_holders_memory_is_refused_said_and_not_given_again(
    place: int,
) -> None:
    async def test() -> None:
        async with hosts() as (host,):
            await put(host, 6, PAYLOAD)
            await put(host, 7, PAYLOAD)
            buffer = next(b for (_, b), kept in host.held.items() if kept[0] == 7)
            host.shelf.view(SLOT, buffer)[place] ^= 1
            with pytest.raises(ReplicaRefused, match=r"slot 3 at iteration 7 is damaged: bytes"):
                await pull(host, 7)
            (said,) = [x for x in host.asked_with if isinstance(x, Damaged)]
            assert (said.slot, said.iteration) == (SLOT, 7)
            with pytest.raises(ReplicaRefused, match="no iteration 7 here"):
                await pull(host, 7)
            assert await pull(host, 6) == PAYLOAD

    run(test)


@pytest.mark.parametrize("what", ["sum", "root", "iteration"])
def test_replica_whose_manifest_was_damaged_is_not_given(what: str) -> None:
    async def test() -> None:
        async with hosts() as (host,):
            await put(host, 7, PAYLOAD)
            kept = host.shelf.manifest(SLOT, 0)
            changes: dict[str, Any] = {
                "sum": {"sums": (*kept.sums[:-1], kept.sums[-1] ^ 1)},
                "root": {"root": kept.root ^ 1},
                "iteration": {"iteration": Iteration(8)},
            }[what]
            host.shelf.seal(SLOT, 0, dataclasses.replace(kept, **changes))
            if what == "iteration":  # It follows from the question, and is never read.
                assert await pull(host, 7) == PAYLOAD
                return
            with pytest.raises(ReplicaRefused, match="checksums themselves"):
                await pull(host, 7)
            assert host.holds() == set()

    run(test)


def test_snapshot_that_is_not_what_was_read_before_is_not_sent_as_such() -> None:
    async def test() -> None:
        async with hosts() as (host,):
            payload = bytearray(PAYLOAD)
            payload[2_999_999] ^= 1
            with pytest.raises(SnapshotDamaged, match="bytes"):
                await put(host, 7, payload, known=manifest_of(PAYLOAD, 7))
            await drained(host)
            assert host.holds() == set()

    run(test)


def test_replica_is_of_its_slot_and_iteration_alone() -> None:
    kept = manifest_of(PAYLOAD, 7)
    sums = list(kept.sums)
    assert kept.flaw(SLOT, Iteration(7), sums) == ""
    assert kept.flaw(Slot(2), Iteration(7), sums)
    assert kept.flaw(SLOT, Iteration(6), sums)


def test_epoch_that_ends_while_bytes_come_in_leaves_no_replica() -> None:
    async def test() -> None:
        async with hosts() as (host,):

            async def next_epoch() -> None:
                host.epoch = Epoch(2)

            with pytest.raises(ReplicaRefused, match="epoch 1 has passed"):
                await put(host, 7, PAYLOAD, halfway=next_epoch)
            assert host.holds() == set()

    run(test)


@pytest.mark.parametrize("size", [1 << 60, (1 << 64) - 1, -1])
def test_offer_of_more_than_there_is_memory_is_refused(size: int) -> None:
    async def test() -> None:
        async with hosts() as (host,):
            with contextlib.closing(await connect(host)) as channel:
                with pytest.raises(ReplicaRefused, match="no memory"):
                    await channel.ask(offer(b"", 7, num_bytes=size))
                assert (await channel.ask(offer(b"12345678", 7))).wants_bytes

    run(test)


# Strangers


def test_wrong_token_is_refused_by_the_dialler_and_changes_nothing() -> None:
    async def test() -> None:
        async with hosts() as (host,):
            await put(host, 6, PAYLOAD)
            for _ in range(3):
                with pytest.raises(WireError, match=r"node 1 .* token"):
                    await TcpChannel.connect(host.member, token=b"another's")
            await drained(host)
            assert host.holds() == {(SLOT, 6)} and len(host.asked_with) == 2

    run(test)


async def drained(host: Host) -> None:
    """Until the server has done with every connection."""
    await asyncio.gather(*host.server._tasks)


async def cut_off(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes:
    """What came before the server ended the connection."""
    try:
        received = await reader.read()
    except ConnectionResetError:
        received = b""
    writer.close()
    return received


@pytest.mark.parametrize(
    "garbage",
    [b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 100_000, m.encode(m.Heartbeat()), b"DEADPOOL\x02"],
    ids=["http", "bytes", "message", "version"],
)
def test_garbage_on_the_data_port_is_cut_off_said_once_and_the_next_put_works(
    garbage: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    async def test() -> None:
        async with hosts() as (host,):
            for _ in range(3):
                reader, writer = await asyncio.open_connection("127.0.0.1", host.server.port)
                writer.write(garbage)
                assert await cut_off(reader, writer) == b""
            assert await put(host, 7, PAYLOAD) == len(PAYLOAD)

    run(test)
    assert [r.getMessage() for r in caplog.records if "refused" in r.getMessage()] == [
        "refused a connection from 127.0.0.1: it speaks another "
        + ("version of the protocol" if garbage.startswith(b"DEADPOOL") else "protocol")
    ]


def test_silent_strangers_are_cut_off_within_the_bound_and_the_next_put_works() -> None:
    async def test() -> None:
        async with hosts(handshake_timeout_s=0.2) as (host,):
            strangers = [
                await asyncio.open_connection("127.0.0.1", host.server.port) for _ in range(5)
            ]
            strangers[0][1].write(b"DEADPOOL")
            for reader, writer in strangers:
                assert await cut_off(reader, writer) == b""
            assert host.asked_with == []

    run(test)


def test_strangers_in_handshake_are_bounded_and_who_comes_then_waits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(replication, "MAX_IN_HANDSHAKE", 16)

    async def test() -> None:
        async with hosts() as (host,):
            strangers = [
                await asyncio.open_connection("127.0.0.1", host.server.port) for _ in range(26)
            ]
            waiting = asyncio.create_task(put(host, 7, PAYLOAD))
            while len(host.server._tasks) < 16:
                await asyncio.sleep(0)
            for _ in range(100):
                await asyncio.sleep(0)
            assert len(host.server._tasks) == 16 and not waiting.done()
            for _, writer in strangers:
                writer.close()
            assert await waiting == len(PAYLOAD)

    run(test)


def test_message_that_is_no_request_ends_an_authenticated_channel() -> None:
    async def test() -> None:
        async with hosts() as (host,):
            for message in (Answer(), m.Heartbeat()):
                with contextlib.closing(await connect(host)) as channel:
                    await channel.send(message)
                    with pytest.raises(WireError):
                        await channel.receive()
            for garbage in (b"\xff" * 4, b"\x02\0\0\0\xff\x80"):
                with contextlib.closing(await connect(host)) as channel:
                    await channel.send_bytes(memoryview(garbage))
                    with pytest.raises(WireError):
                        await channel.receive()
            await drained(host)

    run(test)


def test_server_that_is_silent_or_not_of_the_job_raises_wire_error() -> None:
    async def test() -> None:
        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(b"" if silent else b"220 mail\r\n")
            await reader.read()
            writer.close()

        for silent in (True, False):
            server = await asyncio.start_server(answer, "127.0.0.1", 0)
            member = Member(
                member=MemberId(1),
                node=Node(1),
                local_rank=0,
                host="127.0.0.1",
                control_port=1,
                data_port=server.sockets[0].getsockname()[1],
            )
            with pytest.raises(WireError, match=r"node 1 .* nothing within" if silent else "proto"):
                await TcpChannel.connect(member, token=TOKEN, timeout_s=0.2)
            server.close()
            await server.wait_closed()
            while len(asyncio.all_tasks()) > 2:  # `bounded` waits for this one.
                await asyncio.sleep(0)

    run(test)


# Connections that are cut


def test_connection_cut_half_way_leaves_the_older_replica_and_no_half_one() -> None:
    async def test() -> None:
        async with hosts() as (host,):
            await put(host, 6, PAYLOAD)
            for _ in range(3):
                with contextlib.closing(await connect(host)) as channel:
                    assert (await channel.ask(offer(PAYLOAD, 7))).wants_bytes
                    await channel.send_bytes(memoryview(PAYLOAD)[: len(PAYLOAD) // 2])
            await drained(host)
            assert host.holds() == {(SLOT, 6)}
            assert await pull(host, 6) == PAYLOAD
            assert await put(host, 7, PAYLOAD) == len(PAYLOAD)
            assert host.holds() == {(SLOT, 6), (SLOT, 7)}

    run(test)


def test_second_offer_waits_for_the_first_ones_connection_to_end() -> None:
    """An owner that reconnects must not share a buffer with what its old connection still sends."""

    async def test() -> None:
        async with hosts() as (host,):
            old = await connect(host)
            assert (await old.ask(offer(PAYLOAD, 7))).wants_bytes
            again = asyncio.create_task(put(host, 7, PAYLOAD))
            await old.send_bytes(memoryview(PAYLOAD)[:1000])
            # Long enough for it to end if it did not wait; it cannot end before the old one.
            assert await asyncio.wait({again}, timeout=0.2) == (set(), {again})
            old.close()
            assert await again == len(PAYLOAD)
            assert await pull(host, 7) == PAYLOAD

    run(test)


def test_offer_of_a_newer_epoch_ends_what_still_comes_in_from_an_older_one() -> None:
    """The owner before may have vanished with its host, and its connection not know it."""

    async def test() -> None:
        async with hosts() as (host,):
            old = await connect(host)
            assert (await old.ask(offer(PAYLOAD, 7))).wants_bytes
            host.epoch = Epoch(2)
            assert await put(host, 7, PAYLOAD) == len(PAYLOAD)
            assert await pull(host, 7) == PAYLOAD
            with pytest.raises(WireError):
                await old.receive()
            old.close()

    run(test)


def test_pull_of_what_is_not_held_is_refused_with_the_reason() -> None:
    async def test() -> None:
        async with hosts() as (host,):
            await put(host, 6, PAYLOAD)
            with pytest.raises(ReplicaRefused, match="no iteration 7 here"):
                await pull(host, 7)

    run(test)


def test_server_cancelled_ends_idle_and_busy_connections() -> None:
    async def test() -> None:
        async with hosts() as (host,):
            idle, busy = await connect(host), await connect(host)
            assert (await busy.ask(offer(PAYLOAD, 7))).wants_bytes
        for channel in (idle, busy):
            with pytest.raises(WireError):
                await channel.receive()
            channel.close()
        with pytest.raises(WireError, match="node 1"):
            await TcpChannel.connect(host.member, token=TOKEN)

    run(test)
