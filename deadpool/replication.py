"""Replicas between guardians over TCP, straight from memory to memory.

One connection an epoch from an owner to its holder; one a pull. Both begin with the handshake of
`deadpool.handshake`. All of it runs on the guardian's event loop; checksums run in its executor.
What is taken and given is decided by the callbacks of `ReplicaServer`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import TypeVar

from deadpool.arena import Replica, ReplicaShelf, checksum
from deadpool.handshake import (
    HANDSHAKE_TIMEOUT_S,
    MAX_IN_HANDSHAKE,
    Acceptor,
    Dialer,
    NotOfThisJob,
    Purpose,
    RefusalLog,
)
from deadpool.messages import Answer, Message, Offer, Pull, WireError, encode
from deadpool.protocol.events import AnswerOffer, AnswerPull, Asked, Offered, Received
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


class Channel:
    """Messages and raw payloads on one non-blocking socket."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self._socket = sock

    @classmethod
    async def connect(
        cls, member: Member, *, token: bytes, timeout_s: float = HANDSHAKE_TIMEOUT_S
    ) -> Channel:
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

    async def receive(self) -> Message:
        """The next message; waits without bound for its first byte."""
        header = bytearray(4)
        await self._receive_into(memoryview(header)[:1], timeout_s=None)
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

    async def ask(self, message: Offer | Pull) -> Answer:
        """Send, and take the answer. Raises ReplicaRefused when it is a refusal."""
        await self.send(message)
        return await self.answer()

    async def answer(self) -> Answer:
        answer = await self.receive()
        if not isinstance(answer, Answer):
            raise WireError(f"{type(answer).__name__} where an answer was due")
        if answer.refusal:
            raise ReplicaRefused(answer.refusal)
        return answer

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


class ReplicaServer:
    """Takes and gives replicas.

    offered, received, asked: called on the event loop, between awaits. `received` follows an
    answer with a buffer once that buffer is full; neither comes when the owner's connection ends
    first. Within a slot, from `offered` to `received` or that end, nothing else is offered. They
    must not raise.
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
        handshake_timeout_s: float = HANDSHAKE_TIMEOUT_S,
    ) -> None:
        self._shelf = shelf
        self.token = token
        self._offered = offered
        self._received = received
        self._asked = asked
        self._handshake_timeout_s = handshake_timeout_s
        self._listener = socket.create_server((host, 0), family=family_of(host), backlog=128)
        self._listener.setblocking(False)
        self.port: int = self._listener.getsockname()[1]
        self._tasks: set[asyncio.Task[None]] = set()
        self._receiving: dict[Slot, asyncio.Lock] = {}
        self._num_offers: Counter[Slot] = Counter()
        """That hold or wait for a slot's lock; without any, it is forgotten."""
        self._takers: dict[Slot, tuple[Epoch, asyncio.Task[None]]] = {}
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
                task = loop.create_task(self._serve_channel(Channel(sock), strangers.release))
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

    async def _serve_channel(self, channel: Channel, authenticated: Callable[[], None]) -> None:
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
        if taker is not None and taker[0] < offer.epoch:
            # The owner before, whose host may have vanished without a word.
            taker[1].cancel()
        # An owner that reconnects must not write into the buffer its old connection still fills.
        self._num_offers[offer.slot] += 1
        try:
            async with self._receiving.setdefault(offer.slot, asyncio.Lock()):
                task = asyncio.current_task()
                assert task is not None
                self._takers[offer.slot] = (offer.epoch, task)
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
        await channel.send(Answer(wants_bytes=True))
        await channel.receive_bytes(view)
        found = await _checksum(view)
        self._shelf.seal(offer.slot, verdict.buffer, found)
        verdict = self._received(
            Received(
                slot=offer.slot,
                epoch=offer.epoch,
                iteration=offer.iteration,
                buffer=verdict.buffer,
                num_bytes=offer.num_bytes,
                checksum=found,
                announced=offer.checksum,
            )
        )
        return Answer(refusal=verdict.refusal)

    async def _give(self, channel: Channel, pull: Pull) -> None:
        verdict = self._asked(Asked(slot=pull.slot, epoch=pull.epoch, iteration=pull.iteration))
        if verdict.buffer is None:
            await channel.send(Answer(refusal=verdict.refusal))
            return
        view = self._shelf.view(pull.slot, verdict.buffer)
        kept_as = self._shelf.checksum(pull.slot, verdict.buffer)
        await channel.send(Answer(num_bytes=len(view), checksum=kept_as))
        await channel.send_bytes(view)


async def _checksum(view: memoryview) -> int:
    return await asyncio.get_running_loop().run_in_executor(None, checksum, view)


async def put_replica(
    channel: Channel,
    *,
    slot: Slot,
    epoch: Epoch,
    iteration: Iteration,
    payload: memoryview,
    halfway: Callable[[], Awaitable[None]] | None = None,
) -> int:
    """Stage one snapshot at its holder; returns the bytes sent (0 where it was there already).

    halfway: called when half of the bytes are sent (fault injection). Raises ReplicaRefused, after
    which the channel takes the next one, or WireError, after which it is of no more use.
    """
    offer = Offer(
        slot=slot,
        epoch=epoch,
        iteration=iteration,
        num_bytes=len(payload),
        checksum=await _checksum(payload),
    )
    answer = await channel.ask(offer)
    if not answer.wants_bytes:
        return 0
    middle = len(payload) // 2
    await channel.send_bytes(payload[:middle])
    if halfway is not None:
        await halfway()
    await channel.send_bytes(payload[middle:])
    await channel.answer()
    return len(payload)


async def pull_replica(
    member: Member, *, token: bytes, slot: Slot, epoch: Epoch, iteration: Iteration
) -> Replica:
    """Fetch a replica into fresh memory, checksum verified.

    Raises WireError, or ReplicaRefused where the holder lacks it, the bytes are damaged, or there
    is no memory for them here.
    """
    channel = await Channel.connect(member, token=token)
    with contextlib.ExitStack() as stack:
        stack.callback(channel.close)
        answer = await channel.ask(Pull(slot=slot, epoch=epoch, iteration=iteration))
        try:
            replica = Replica.allocate(answer.num_bytes)
        except OSError as error:
            raise ReplicaRefused(f"no memory for the replica of slot {slot}: {error}") from error
        stack.callback(replica.close)
        await channel.receive_bytes(replica.view)
        found = await _checksum(replica.view)
        if found != answer.checksum:
            raise ReplicaRefused(
                f"replica of slot {slot} at iteration {iteration} from node {member.node} is "
                f"damaged: checksum {found:#x}, kept as {answer.checksum:#x}"
            )
        stack.pop_all()
    channel.close()
    replica.checksum = found
    return replica
