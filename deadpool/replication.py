"""Replicas between guardians over TCP, straight from memory to memory.

One connection an epoch from an owner to its holder; one a pull. All of it runs on the guardian's
event loop; checksums run in its executor.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import mmap
import socket
from collections.abc import Awaitable, Callable
from typing import TypeVar

from deadpool.arena import Replica, ReplicaShelf, checksum
from deadpool.messages import Answer, AnyMessage, Message, Offer, Pull, encode
from deadpool.protocol.types import Epoch, Iteration, Member, Slot
from deadpool.wire import WireError, checked_length, parse_message

_T = TypeVar("_T")

logger = logging.getLogger(__name__)

IO_TIMEOUT_S = 120.0
"""Bound of one send, or of the next bytes to come. Membership notices a dead peer long before."""


class ReplicaRefused(Exception):
    """The other side answered and does not take or give the replica."""


class Channel:
    """Messages and raw payloads on one non-blocking socket."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket = sock

    @classmethod
    async def connect(cls, member: Member) -> Channel:
        """Raises WireError when nobody listens there."""
        sock = socket.socket(_family(member.host))
        sock.setblocking(False)
        address = (member.host, member.data_port)
        try:
            await _bounded(asyncio.get_running_loop().sock_connect(sock, address))
        except WireError as error:
            sock.close()
            raise WireError(f"node {member.node} does not answer on its data port") from error
        return cls(sock)

    async def send(self, message: Message) -> None:
        await self.send_bytes(memoryview(encode(message)))

    async def send_bytes(self, view: memoryview) -> None:
        await _bounded(asyncio.get_running_loop().sock_sendall(self._socket, view))

    async def receive(self) -> AnyMessage:
        """The next message; waits without bound for its first byte."""
        header = bytearray(4)
        await self._receive_into(memoryview(header), timeout_s=None)
        body = bytearray(checked_length(bytes(header)))
        await self._receive_into(memoryview(body), timeout_s=IO_TIMEOUT_S)
        return parse_message(bytes(body))

    async def receive_bytes(self, view: memoryview) -> None:
        await self._receive_into(view, timeout_s=IO_TIMEOUT_S)

    async def _receive_into(self, view: memoryview, *, timeout_s: float | None) -> None:
        loop = asyncio.get_running_loop()
        while view:
            count = await _bounded(loop.sock_recv_into(self._socket, view), timeout_s)
            if count == 0:
                raise WireError("the data connection ended")
            view = view[count:]

    async def ask(self, message: Message) -> Answer:
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

    def close(self) -> None:
        self._socket.close()


async def _bounded(operation: Awaitable[_T], timeout_s: float | None = IO_TIMEOUT_S) -> _T:
    try:
        return await asyncio.wait_for(operation, timeout_s)
    except (OSError, asyncio.TimeoutError) as error:
        raise WireError("the data connection ended") from error


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


class ReplicaServer:
    """Takes and gives replicas. current_epoch: offers of another epoch are refused."""

    def __init__(
        self, *, shelf: ReplicaShelf, token: str, host: str, current_epoch: Callable[[], Epoch]
    ) -> None:
        self._shelf = shelf
        self._token = token
        self._current_epoch = current_epoch
        self._listener = socket.create_server((host, 0), family=_family(host), backlog=128)
        self._listener.setblocking(False)
        self.port: int = self._listener.getsockname()[1]
        self._tasks: set[asyncio.Task[None]] = set()
        self._receiving: dict[Slot, asyncio.Lock] = {}

    async def serve(self) -> None:
        """Accept until cancelled; then end every connection."""
        loop = asyncio.get_running_loop()
        try:
            while True:
                sock, _ = await loop.sock_accept(self._listener)
                task = loop.create_task(self._serve_channel(Channel(sock)))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
        finally:
            self._listener.close()
            for task in list(self._tasks):
                task.cancel()

    async def _serve_channel(self, channel: Channel) -> None:
        try:
            while True:
                message = await channel.receive()
                if isinstance(message, Offer) and message.token == self._token:
                    await self._take(channel, message)
                elif isinstance(message, Pull) and message.token == self._token:
                    await self._give(channel, message)
                else:
                    logger.warning("refused a data connection that is not of this job")
                    return
        except WireError:
            return  # The owner went on to another epoch, or died: membership deals with it.
        finally:
            channel.close()

    async def _take(self, channel: Channel, offer: Offer) -> None:
        if offer.epoch != self._current_epoch():
            refusal = f"epoch {offer.epoch}, now is {self._current_epoch()}"
            await channel.send(Answer(refusal=refusal))
            return
        # An owner that reconnects must not write into the buffer its old connection still fills.
        async with self._receiving.setdefault(offer.slot, asyncio.Lock()):
            held = self._shelf.find(offer.slot, offer.iteration)
            if held is not None and (held.checksum, held.num_bytes) == (
                offer.checksum,
                offer.num_bytes,
            ):
                await channel.send(Answer(wants_bytes=False))
                return
            if held is not None:
                held.iteration = None  # Other bytes of the iteration: `find` must not meet them.
            await channel.send(Answer(wants_bytes=True))
            replica = self._shelf.open_buffer(offer.slot, offer.num_bytes)
            await channel.receive_bytes(replica.view)
            found = await _checksum(replica.view)
            if found != offer.checksum:
                await channel.send(
                    Answer(refusal=f"checksum {found:#x}, announced {offer.checksum:#x}")
                )
                return
            if offer.epoch != self._current_epoch():
                await channel.send(Answer(refusal=f"epoch {offer.epoch} has passed"))
                return
            replica.iteration, replica.checksum = offer.iteration, offer.checksum
        await channel.send(Answer())

    async def _give(self, channel: Channel, pull: Pull) -> None:
        replica = self._shelf.find(pull.slot, pull.iteration)
        if replica is None:
            refusal = f"no replica of slot {pull.slot} at iteration {pull.iteration} here"
            await channel.send(Answer(refusal=refusal))
            return
        await channel.send(Answer(num_bytes=replica.num_bytes, checksum=replica.checksum))
        await channel.send_bytes(replica.view)


async def _checksum(view: memoryview) -> int:
    return await asyncio.get_running_loop().run_in_executor(None, checksum, view)


async def put_replica(
    channel: Channel,
    *,
    token: str,
    slot: Slot,
    epoch: Epoch,
    iteration: Iteration,
    payload: memoryview,
    halfway: Callable[[], Awaitable[None]] | None = None,
) -> int:
    """Stage one snapshot at its holder; returns the bytes sent (0 where it was there already).

    halfway: called when half of the bytes are sent (fault injection). Raises WireError or
    ReplicaRefused; the owner tries again or waits for the next epoch.
    """
    offer = Offer(
        token=token,
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


async def pull_replica(member: Member, *, token: str, slot: Slot, iteration: Iteration) -> Replica:
    """Fetch a replica into fresh memory, checksum verified.

    Raises WireError, or ReplicaRefused where the holder lacks it or the bytes are damaged.
    """
    channel = await Channel.connect(member)
    with contextlib.closing(channel):
        answer = await channel.ask(Pull(token=token, slot=slot, iteration=iteration))
        replica = Replica(
            memory=mmap.mmap(-1, max(answer.num_bytes, 1)), num_bytes=answer.num_bytes
        )
        await channel.receive_bytes(replica.view)
    found = await _checksum(replica.view)
    if found != answer.checksum:
        raise ReplicaRefused(
            f"replica of slot {slot} at iteration {iteration} from node {member.node} is damaged: "
            f"checksum {found:#x}, kept as {answer.checksum:#x}"
        )
    replica.iteration, replica.checksum = iteration, answer.checksum
    return replica
