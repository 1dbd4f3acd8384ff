"""Replicas between guardians, straight from memory to memory; over TCP unless a channel of another
transport is given.

One connection an epoch from an owner to its holder; one a pull. Both begin with the handshake of
`deadpool.handshake`. All of it runs on the guardian's event loop; checksums run in its executor, of
one chunk while the next one moves. What is taken and given is decided by the callbacks of
`ReplicaServer`.
"""

from __future__ import annotations

import abc
import asyncio
import contextlib
import logging
import socket
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple, TypeVar

from deadpool.arena import Replica, ReplicaShelf
from deadpool.handshake import (
    HANDSHAKE_TIMEOUT_S,
    MAX_IN_HANDSHAKE,
    Acceptor,
    Dialer,
    NotOfThisJob,
    Purpose,
    RefusalLog,
)
from deadpool.integrity import Manifest, begin_sum, chunks
from deadpool.messages import Answer, Message, Offer, Pull, Sealed, WireError, encode
from deadpool.protocol.events import AnswerOffer, AnswerPull, Asked, Damaged, Offered, Received
from deadpool.protocol.types import Epoch, Iteration, Member, Slot
from deadpool.wire import checked_length, family_of, parse_message, tune

_T = TypeVar("_T")

logger = logging.getLogger(__name__)

IO_TIMEOUT_S = 120.0
"""Bound of one send, or of the next bytes to come. Membership notices a dead peer long before."""

MAX_HEADER_BYTES = 64 << 10
"""Of one message; payloads are outside of messages."""

_ACCEPT_PAUSE_S = 1.0
"""After accepting failed, as for want of file descriptors."""


class ReplicaRefused(Exception):
    """The other side answered and does not take or give the replica."""


class SnapshotDamaged(Exception):
    """What was to be sent is not what it was."""


class Channel(abc.ABC):
    """Messages and raw payloads between an owner and its holder, in order; what every transport
    has. After a WireError it is of no more use."""

    answer_timeout_s: float | None = None
    """None where a dead peer shows in other ways."""
    outlives_owner = False
    """Its owner's giving up does not show at the holder."""

    @abc.abstractmethod
    async def send(self, message: Message) -> None: ...

    @abc.abstractmethod
    async def receive(self, first_byte_timeout_s: float | None = None) -> Message:
        """The next message; waits without bound for its first byte, unless one is given."""

    @abc.abstractmethod
    async def send_bytes(self, view: memoryview) -> None: ...

    def expect(self, payload: memoryview) -> None:  # noqa: B027
        """`receive_bytes` is about to be called for all of `payload`, piece by piece."""

    @abc.abstractmethod
    async def receive_bytes(self, view: memoryview) -> None: ...

    @property
    @abc.abstractmethod
    def peer(self) -> str:
        """The other end, in words."""

    async def ask(self, message: Offer | Pull) -> Answer:
        """Send, and take the answer. Raises ReplicaRefused when it is a refusal."""
        await self.send(message)
        return await self.answer()

    async def answer(self) -> Answer:
        answer = await self.receive(self.answer_timeout_s)
        if not isinstance(answer, Answer):
            raise WireError(f"{type(answer).__name__} where an answer was due")
        if answer.refusal:
            raise ReplicaRefused(answer.refusal)
        return answer


class TcpChannel(Channel):
    """On one non-blocking socket."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self._socket = sock

    @classmethod
    async def connect(
        cls, member: Member, *, token: bytes, timeout_s: float = HANDSHAKE_TIMEOUT_S
    ) -> TcpChannel:
        """Authenticated both ways. Raises WireError when nobody of this job answers within the
        bound."""
        channel = cls(socket.socket(family_of(member.host)))
        address = (member.host, member.data_port)
        with contextlib.ExitStack() as stack:
            stack.callback(channel.close)
            try:
                await asyncio.wait_for(channel._dial(address, token), timeout_s)
            except (OSError, asyncio.TimeoutError, NotOfThisJob) as error:
                reason = str(error) or f"nothing within {timeout_s:g} s"
                raise WireError(
                    f"node {member.node} does not answer on its data port: {reason}"
                ) from error
            stack.pop_all()
        return channel

    async def _dial(self, address: tuple[str, int], token: bytes) -> None:
        await asyncio.get_running_loop().sock_connect(self._socket, address)
        tune(self._socket)
        dialer = Dialer(token, Purpose.DATA)
        await self._send_raw(dialer.opening)
        await self._prove(dialer)

    async def accept(self, token: bytes) -> None:
        """The other end's part of `connect`. Unbounded; raises WireError, OSError, NotOfThisJob."""
        tune(self._socket)
        await self._prove(Acceptor(token, Purpose.DATA))

    async def _prove(self, side: Dialer | Acceptor) -> None:
        loop = asyncio.get_running_loop()
        while side.wanted:
            data = await loop.sock_recv(self._socket, side.wanted)
            if not data:
                raise WireError("the data connection ended")
            await self._send_raw(side.receive(data))

    async def _send_raw(self, data: bytes) -> None:
        await asyncio.get_running_loop().sock_sendall(self._socket, data)

    async def send(self, message: Message) -> None:
        await self.send_bytes(memoryview(encode(message)))

    async def send_bytes(self, view: memoryview) -> None:
        await _bounded(asyncio.get_running_loop().sock_sendall(self._socket, view))

    async def receive(self, first_byte_timeout_s: float | None = None) -> Message:
        header = bytearray(4)
        await self._receive_into(memoryview(header)[:1], timeout_s=first_byte_timeout_s)
        await self._receive_into(memoryview(header)[1:], timeout_s=IO_TIMEOUT_S)
        body = bytearray(checked_length(header, MAX_HEADER_BYTES))
        await self._receive_into(memoryview(body), timeout_s=IO_TIMEOUT_S)
        return parse_message(body)

    async def receive_bytes(self, view: memoryview) -> None:
        await self._receive_into(view, timeout_s=IO_TIMEOUT_S)

    async def _receive_into(self, view: memoryview, *, timeout_s: float | None) -> None:
        loop = asyncio.get_running_loop()
        while view:
            count = await _bounded(loop.sock_recv_into(self._socket, view), timeout_s)
            if count == 0:
                raise WireError("the data connection ended")
            view = view[count:]

    @property
    def peer(self) -> str:
        """The other end's address."""
        try:
            return str(self._socket.getpeername()[0])
        except OSError:
            return "an unknown address"

    def close(self) -> None:
        self._socket.close()


async def _bounded(operation: Awaitable[_T], timeout_s: float | None = IO_TIMEOUT_S) -> _T:
    try:
        return await asyncio.wait_for(operation, timeout_s)
    except (OSError, asyncio.TimeoutError) as error:
        raise WireError("the data connection ended") from error


class _Taker(NamedTuple):
    epoch: Epoch
    channel: Channel
    task: asyncio.Task[Any]


class ReplicaServer:
    """Takes and gives replicas.

    offered, received, asked: called on the event loop, between awaits. `received` follows an
    answer with a buffer once that buffer is full; neither comes when the owner's connection ends
    first. Within a slot, from `offered` to `received` or that end, nothing else is offered.
    damaged: a replica that was asked for is not what came in; not to be given again. They must not
    raise.
    """

    def __init__(
        self,
        *,
        shelf: ReplicaShelf,
        token: bytes,
        host: str,
        offered: Callable[[Offered], AnswerOffer],
        received: Callable[[Received], AnswerOffer],
        asked: Callable[[Asked], AnswerPull],
        damaged: Callable[[Damaged], None],
        handshake_timeout_s: float = HANDSHAKE_TIMEOUT_S,
    ) -> None:
        self._shelf = shelf
        self.token = token
        self._offered = offered
        self._received = received
        self._asked = asked
        self._damaged = damaged
        self._handshake_timeout_s = handshake_timeout_s
        self._listener = socket.create_server((host, 0), family=family_of(host), backlog=128)
        self._listener.setblocking(False)
        self.port: int = self._listener.getsockname()[1]
        self._tasks: set[asyncio.Task[None]] = set()
        self._receiving: dict[Slot, asyncio.Lock] = {}
        self._num_offers: Counter[Slot] = Counter()
        """That hold or wait for a slot's lock; without any, it is forgotten."""
        self._takers: dict[Slot, _Taker] = {}
        """Whose bytes come in."""
        self._refusals = RefusalLog(logger)

    async def serve(self) -> None:
        """Accept until cancelled; then end every connection."""
        loop = asyncio.get_running_loop()
        strangers = asyncio.Semaphore(MAX_IN_HANDSHAKE)
        try:
            while True:
                await strangers.acquire()
                sock = await self._accept()
                task = loop.create_task(self._serve_channel(TcpChannel(sock), strangers.release))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
        finally:
            self._listener.close()
            tasks = list(self._tasks)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _accept(self) -> socket.socket:
        while True:
            try:
                sock, _ = await asyncio.get_running_loop().sock_accept(self._listener)
                return sock
            except ConnectionAbortedError:
                continue
            except OSError as error:
                logger.error("cannot accept data connections: %s", error)
                await asyncio.sleep(_ACCEPT_PAUSE_S)

    async def _serve_channel(self, channel: TcpChannel, authenticated: Callable[[], None]) -> None:
        with contextlib.closing(channel):
            try:
                await asyncio.wait_for(channel.accept(self.token), self._handshake_timeout_s)
            except asyncio.TimeoutError:
                self._refusals.note(channel.peer, "its handshake took too long")
                return
            except NotOfThisJob as error:
                self._refusals.note(channel.peer, str(error))
                return
            except OSError:
                return  # It went away.
            finally:
                authenticated()
            try:
                await self._serve_requests(channel)
            except WireError:
                return  # The owner went on to another epoch, or died: membership deals with it.

    async def serve_channel(self, channel: Channel) -> None:
        """Take the replicas that come on a channel of another transport, whose ends are known to
        be of the job. Returns when it has ended, or was given up by its owner."""
        try:
            await self._serve_requests(channel)
        except WireError:
            return

    async def _serve_requests(self, channel: Channel) -> None:
        while True:
            message = await channel.receive()
            if isinstance(message, Offer):
                await self._take(channel, message)
            elif isinstance(message, Pull):
                await self._give(channel, message)
            else:
                kind = f"{type(message).__name__} where a request was due"
                self._refusals.note(channel.peer, kind)
                return

    async def _take(self, channel: Channel, offer: Offer) -> None:
        taker = self._takers.get(offer.slot)
        if taker is not None and (taker.epoch < offer.epoch or taker.channel.outlives_owner):
            # The owner before, whose host may have vanished without a word; or the same owner,
            # which has given that transport up.
            taker.task.cancel()
        # An owner that reconnects must not write into the buffer its old connection still fills.
        self._num_offers[offer.slot] += 1
        try:
            async with self._receiving.setdefault(offer.slot, asyncio.Lock()):
                task = asyncio.current_task()
                assert task is not None
                self._takers[offer.slot] = _Taker(offer.epoch, channel, task)
                try:
                    answer = await self._take_alone(channel, offer)
                finally:
                    del self._takers[offer.slot]
        finally:
            self._num_offers[offer.slot] -= 1
            if not self._num_offers[offer.slot]:
                del self._num_offers[offer.slot], self._receiving[offer.slot]
        await channel.send(answer)

    async def _take_alone(self, channel: Channel, offer: Offer) -> Answer:
        """Returns the last answer."""
        verdict = self._offered(
            Offered(
                slot=offer.slot,
                epoch=offer.epoch,
                iteration=offer.iteration,
                num_bytes=offer.num_bytes,
                checksum=offer.checksum,
            )
        )
        if verdict.buffer is None:
            return Answer(refusal=verdict.refusal)
        try:
            view = self._shelf.memory(offer.slot, verdict.buffer, offer.num_bytes)
        except OSError as error:
            return Answer(refusal=f"no memory for a replica: {error}")
        try:
            channel.expect(view)
            await channel.send(Answer(wants_bytes=True))
            sums = await _receive_summed(channel, view)
        except BaseException:
            self._shelf.drop(offer.slot, verdict.buffer)
            raise
        sealed = await channel.receive(IO_TIMEOUT_S)
        if not isinstance(sealed, Sealed):
            raise WireError(f"{type(sealed).__name__} where a replica's checksum was due")
        manifest = Manifest.of(
            slot=offer.slot, iteration=offer.iteration, num_bytes=offer.num_bytes, sums=sums
        )
        self._shelf.seal(offer.slot, verdict.buffer, manifest)
        verdict = self._received(
            Received(
                slot=offer.slot,
                epoch=offer.epoch,
                iteration=offer.iteration,
                buffer=verdict.buffer,
                num_bytes=offer.num_bytes,
                checksum=manifest.root,
                announced=sealed.checksum,
            )
        )
        return Answer(refusal=verdict.refusal)

    async def _give(self, channel: Channel, pull: Pull) -> None:
        verdict = self._asked(Asked(slot=pull.slot, epoch=pull.epoch, iteration=pull.iteration))
        if verdict.buffer is None:
            await channel.send(Answer(refusal=verdict.refusal))
            return
        view = self._shelf.view(pull.slot, verdict.buffer)
        manifest = self._shelf.manifest(pull.slot, verdict.buffer)
        await channel.send(Answer(num_bytes=len(view)))
        sums = await _send_summed(channel, view)
        flaw = manifest.flaw(pull.slot, pull.iteration, sums)
        if not flaw:
            await channel.send(Answer(checksum=manifest.root))
            return
        if self._shelf.holds(pull.slot, verdict.buffer, manifest):
            # Not because a newer replica was let into the buffer meanwhile.
            self._damaged(Damaged(slot=pull.slot, iteration=pull.iteration, reason=flaw))
        reason = f"its replica of slot {pull.slot} at iteration {pull.iteration} is damaged: {flaw}"
        await channel.send(Answer(refusal=reason))


async def _receive_summed(channel: Channel, payload: memoryview) -> list[int]:
    """Fill `payload`; the checksums of its chunks as they came in."""
    sums: list[asyncio.Future[int]] = []
    for chunk in chunks(payload):
        await channel.receive_bytes(chunk)
        sums.append(begin_sum(chunk))
    return [await each for each in sums]


async def _send_summed(
    channel: Channel,
    payload: memoryview,
    *,
    halfway: Callable[[], Awaitable[None]] | None = None,
) -> list[int]:
    """Send `payload`; the checksums of its chunks, each of just before it went."""
    sums: list[int] = []
    pieces = list(chunks(payload))
    coming = begin_sum(pieces[0]) if pieces else None
    for index, piece in enumerate(pieces):
        assert coming is not None
        sums.append(await coming)
        if index + 1 < len(pieces):
            coming = begin_sum(pieces[index + 1])
        middle = len(piece) // 2 if halfway is not None and index == len(pieces) // 2 else 0
        if middle and halfway is not None:
            await channel.send_bytes(piece[:middle])
            await halfway()
        await channel.send_bytes(piece[middle:])
    return sums


async def put_replica(
    channel: Channel,
    *,
    slot: Slot,
    epoch: Epoch,
    iteration: Iteration,
    payload: memoryview,
    known: Manifest | None = None,
    summed: Callable[[Manifest], None] = lambda manifest: None,
    halfway: Callable[[], Awaitable[None]] | None = None,
) -> int:
    """Stage one snapshot at its holder; returns the bytes sent (0 where it was there already).

    known: what the snapshot was when it was whole, where it was read before. summed: called with
    it where it was not, once it was read. halfway: called when half of the bytes are sent (fault
    injection). Raises ReplicaRefused, after which the channel takes the next one, or WireError,
    after which it is of no more use, as after SnapshotDamaged: the payload is not `known` any more.
    """
    offer = Offer(
        slot=slot,
        epoch=epoch,
        iteration=iteration,
        num_bytes=len(payload),
        checksum=known.root if known is not None else None,
    )
    answer = await channel.ask(offer)
    if not answer.wants_bytes:
        return 0
    sums = await _send_summed(channel, payload, halfway=halfway)
    if known is None:
        known = Manifest.of(slot=slot, iteration=iteration, num_bytes=len(payload), sums=sums)
        summed(known)
    elif flaw := known.flaw(slot, iteration, sums):
        raise SnapshotDamaged(flaw)
    await channel.send(Sealed(checksum=known.root))
    await channel.answer()
    return len(payload)


async def pull_replica(
    member: Member, *, token: bytes, slot: Slot, epoch: Epoch, iteration: Iteration
) -> Replica:
    """Fetch a replica into fresh memory, verified by both ends.

    Raises WireError, also for bytes that were damaged on the way, or ReplicaRefused where the
    holder lacks it, finds it damaged, or there is no memory for it here.
    """
    channel = await TcpChannel.connect(member, token=token)
    with contextlib.ExitStack() as stack:
        stack.callback(channel.close)
        answer = await channel.ask(Pull(slot=slot, epoch=epoch, iteration=iteration))
        try:
            replica = Replica.allocate(answer.num_bytes)
        except OSError as error:
            raise ReplicaRefused(f"no memory for the replica of slot {slot}: {error}") from error
        stack.callback(replica.close)
        sums = await _receive_summed(channel, replica.view)
        kept = await channel.answer()
        found = Manifest.of(slot=slot, iteration=iteration, num_bytes=answer.num_bytes, sums=sums)
        if found.root != kept.checksum:
            raise WireError(
                f"the replica of slot {slot} at iteration {iteration} from node {member.node} was "
                f"damaged on the way: checksum {found.root:#x}, kept as {kept.checksum:#x}"
            )
        stack.pop_all()
    channel.close()
    replica.manifest = found
    return replica
