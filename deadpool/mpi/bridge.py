"""The guardian's end of a sidecar: one for each epoch. Everything runs on the guardian's event
loop."""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import enum
import logging
import os
import select
import signal
import socket
import struct
from collections.abc import Callable, Coroutine
from typing import Any

from deadpool import messages as m
from deadpool.arena import locate
from deadpool.handshake import HANDSHAKE_TIMEOUT_S, Acceptor, NotOfThisJob, Purpose
from deadpool.messages import WireError
from deadpool.mpi import frames as f
from deadpool.protocol.types import Slot
from deadpool.replication import Channel
from deadpool.wire import parse_message

logger = logging.getLogger(__name__)

STALL_TIMEOUT_S = 10.0
"""Without an answer, or a chunk moved, for so long, a world counts as lost: well below the bound
of a commit, so that TCP can still do it."""

_END_TIMEOUT_S = 1.0
"""For a sidecar to end by itself once its guardian has hung up; then it is killed."""


class BridgeState(enum.Enum):
    WAITING = "the sidecar has not attached, or others' have not"
    UP = "every slot's sidecar is there"
    ENDED = "hung up"


@dataclasses.dataclass(slots=True)
class _Payload:
    """How far one payload is, in bytes from its start."""

    descriptor: int = -1
    start: int = 0
    """Where it lies in its file."""
    num_given: int = 0
    """By the caller to send, or asked for."""
    num_cut: int = 0
    """To the sidecar."""
    num_moved: int = 0
    """By MPI."""


class SidecarChannel(Channel):
    """Replicas of slot `owner`, this guardian's or `peer`'s, by way of the sidecar."""

    answer_timeout_s = STALL_TIMEOUT_S
    outlives_owner = True

    def __init__(self, bridge: Bridge, peer_slot: Slot, owner: Slot) -> None:
        self._bridge = bridge
        self._peer_slot = peer_slot
        self._owner = owner
        self._inbox: collections.deque[m.Message] = collections.deque()
        self._news = asyncio.Event()
        self._end = ""
        """Why nothing more comes."""
        self._sent = _Payload()
        self._received = _Payload()

    @property
    def peer(self) -> str:
        return f"slot {self._peer_slot}"

    # What comes

    def deliver(self, message: m.Message) -> None:
        self._inbox.append(message)
        self._news.set()

    def moved(self, is_send: bool, num_bytes: int) -> None:
        (self._sent if is_send else self._received).num_moved += num_bytes
        self._news.set()

    def end(self, reason: str) -> None:
        self._end = self._end or reason
        self._news.set()

    async def _until(self, is_met: Callable[[], bool], timeout_s: float | None) -> None:
        """timeout_s: between two pieces of news."""
        while not is_met():
            if self._end:
                raise WireError(self._end)
            self._news.clear()
            try:
                await asyncio.wait_for(self._news.wait(), timeout_s)
            except asyncio.TimeoutError as error:
                raise WireError(
                    f"nothing from slot {self._peer_slot} in {timeout_s:g} s"
                ) from error

    # What a transport has

    async def send(self, message: m.Message) -> None:
        """After what `send_bytes` was given has gone."""
        sent = self._sent
        self._cut(everything=True)
        await self._until(lambda: sent.num_moved >= sent.num_cut, STALL_TIMEOUT_S)
        self._sent = _Payload()
        body = m.encode(message)[4:]
        self._bridge.send(f.Say(peer=self._peer_slot, owner=self._owner, body=body))

    async def receive(self, first_byte_timeout_s: float | None = None) -> m.Message:
        timeout_s = None if first_byte_timeout_s is None else STALL_TIMEOUT_S
        await self._until(lambda: bool(self._inbox), timeout_s)
        return self._inbox.popleft()

    async def send_bytes(self, view: memoryview) -> None:
        """`view` follows the one before in memory. A piece of a chunk waits for the rest of it, or
        for the next message."""
        if not view:
            return
        sent = self._sent
        descriptor, offset = locate(view)
        if sent.num_given == 0:
            sent.descriptor, sent.start = descriptor, offset
        assert (descriptor, offset) == (sent.descriptor, sent.start + sent.num_given)
        sent.num_given += len(view)
        self._cut(everything=False)
        bound = (f.MAX_IN_FLIGHT - 1) * f.CHUNK_BYTES
        await self._until(lambda: sent.num_cut - sent.num_moved <= bound, STALL_TIMEOUT_S)

    def _cut(self, *, everything: bool) -> None:
        """Give whole chunks to the sidecar. With `everything` the last one, too."""
        sent = self._sent
        while (left := sent.num_given - sent.num_cut) >= (1 if everything else f.CHUNK_BYTES):
            num_bytes = min(left, f.CHUNK_BYTES)
            self._move(True, sent.descriptor, sent.start + sent.num_cut, num_bytes)
            sent.num_cut += num_bytes

    def _move(self, is_send: bool, descriptor: int, offset: int, num_bytes: int) -> None:
        move = f.Move(peer=self._peer_slot, is_send=is_send, offset=offset, num_bytes=num_bytes)
        self._bridge.send(move, descriptor)

    def expect(self, payload: memoryview) -> None:
        self._received = _Payload()
        if payload:
            self._move(False, *locate(payload), len(payload))

    async def receive_bytes(self, view: memoryview) -> None:
        received = self._received
        received.num_given += len(view)
        await self._until(lambda: received.num_moved >= received.num_given, STALL_TIMEOUT_S)


class Bridge:
    """Waits for the sidecar of one slot in one epoch, and speaks to it.

    key: of the epoch's world. serve: takes replicas that others' sidecars bring. start: runs it.
    up: called once, with the library's name. ended: called once, with the reason, when a sidecar
    that had attached is gone and `close` was not called.
    """

    def __init__(
        self,
        *,
        key: bytes,
        slot: Slot,
        serve: Callable[[Channel], Coroutine[Any, Any, None]],
        start: Callable[[Coroutine[Any, Any, Any]], asyncio.Task[Any]],
        up: Callable[[str], None],
        ended: Callable[[str], None],
    ) -> None:
        self._key = key
        self._slot = slot
        self._serve = serve
        self._start = start
        self._up = up
        self._ended = ended
        self.state = BridgeState.WAITING
        self._socket: socket.socket | None = None
        self._pidfd = -1
        self._segments: set[str] = set()
        self._session = ""
        self.sidecar_pid = 0
        """Once it has attached."""
        self._channels: dict[tuple[Slot, Slot], SidecarChannel] = {}
        """By peer and owner."""
        self._servers: list[asyncio.Task[Any]] = []
        self._task: asyncio.Task[Any] | None = None

    def open(self) -> None:
        self._task = self._start(self._run())

    def channel_to(self, holder: Slot) -> SidecarChannel:
        """For one put of this slot. Raises WireError when there is no world any more."""
        if self.state is not BridgeState.UP:
            raise WireError("the MPI world has ended")
        channel = SidecarChannel(self, holder, self._slot)
        self._channels[holder, self._slot] = channel
        return channel

    def send(self, frame: f.Say | f.Move, descriptor: int | None = None) -> None:
        """Raises WireError."""
        try:
            if self._socket is None:
                raise OSError("it has ended")
            descriptors = [] if descriptor is None else [descriptor]
            socket.send_fds(self._socket, [f.encode(frame)], descriptors)
        except OSError as error:
            raise WireError(f"the sidecar takes nothing: {error}") from error

    def give_up(self, reason: str) -> None:
        """Something is wrong with the world: hang up, which ends all of it. May be called again."""
        self._end(reason, is_lost=True)

    def close(self) -> None:
        """The epoch has ended."""
        self._end("the epoch has ended", is_lost=False)

    def _end(self, reason: str, *, is_lost: bool) -> None:
        if self.state is BridgeState.ENDED:
            return
        self.state = BridgeState.ENDED
        for channel in self._channels.values():
            channel.end(reason)
        for server in self._servers:
            server.cancel()
        if self._task is not None:
            self._task.cancel()
        if is_lost:
            self._ended(reason)

    async def _run(self) -> None:
        try:
            await self._attach()
            while True:
                self._handle(await self._receive())
        except OSError as error:  # WireError, or no socket to listen on.
            self._end(str(error), is_lost=True)
        except asyncio.CancelledError:
            pass  # By `_end`, or by the guardian's end: what is left is to put the sidecar down.
        finally:
            self._end("the guardian ends", is_lost=False)
            await self._put_down()

    async def _attach(self) -> None:
        loop = asyncio.get_running_loop()
        with f.packet_socket() as listener:
            listener.bind(f.address(self._key, self._slot))
            listener.listen(8)
            listener.setblocking(False)
            while self._socket is None:
                sock, _ = await loop.sock_accept(listener)
                try:
                    sock.setblocking(False)
                    await asyncio.wait_for(self._prove(sock), HANDSHAKE_TIMEOUT_S)
                    self._watch(sock)
                except (NotOfThisJob, OSError, asyncio.TimeoutError) as error:
                    logger.warning("refused a sidecar: %s", error)
                finally:
                    if self._socket is not sock:
                        sock.close()

    async def _prove(self, sock: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        side = Acceptor(self._key, Purpose.SIDECAR)
        while side.wanted:
            data = await loop.sock_recv(sock, side.wanted)
            if not data:
                raise NotOfThisJob("it hung up")
            if answer := side.receive(data):
                await loop.sock_sendall(sock, answer)

    def _watch(self, sock: socket.socket) -> None:
        peer = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
        pid, user, _ = struct.unpack("iII", peer)
        if user != os.geteuid():
            raise NotOfThisJob(f"it belongs to user {user}")
        self._pidfd = os.pidfd_open(pid)
        self.sidecar_pid = pid
        self._segments = f.segments(pid)
        self._socket = sock

    async def _receive(self) -> Any:
        assert self._socket is not None
        loop = asyncio.get_running_loop()
        try:
            data = await loop.sock_recv(self._socket, f.MAX_PACKET_BYTES)
        except OSError as error:
            raise WireError(f"the sidecar has ended: {error}") from error
        if not data:
            raise WireError("the sidecar has ended")
        return f.decode(data)

    def _handle(self, frame: Any) -> None:
        match frame:
            case f.Up():
                self.state = BridgeState.UP
                self._segments |= f.segments(self.sidecar_pid)
                self._session = frame.session
                self._up(frame.library)
            case f.Say():
                message = parse_message(frame.body)
                self._channel(Slot(frame.peer), Slot(frame.owner)).deliver(message)
            case f.Moved():
                owner = self._slot if frame.is_send else Slot(frame.peer)
                self._channel(Slot(frame.peer), owner).moved(frame.is_send, frame.num_bytes)
            case f.Failed():
                raise WireError(frame.reason)
            case _:
                raise WireError(f"{type(frame).__name__} from a sidecar")

    def _channel(self, peer: Slot, owner: Slot) -> SidecarChannel:
        channel = self._channels.get((peer, owner))
        if channel is None:
            if owner != peer:
                raise WireError(f"an answer of slot {peer} to nothing")
            channel = self._channels[peer, owner] = SidecarChannel(self, peer, owner)
            self._servers.append(self._start(self._take_from(channel)))
        return channel

    async def _take_from(self, channel: SidecarChannel) -> None:
        """Its end, other than with the epoch, is the world's: bytes may still come where nobody
        waits for them."""
        try:
            await self._serve(channel)
        finally:
            self.give_up(f"replicas of {channel.peer} do not come")

    async def _put_down(self) -> None:
        """Hang up, see the sidecar end, and remove what its library leaves."""
        if self._socket is None:
            return
        self._segments |= f.segments(self.sidecar_pid)
        self._socket.close()
        self._socket = None
        try:
            await _readable(self._pidfd, _END_TIMEOUT_S)
        finally:
            if not select.select([self._pidfd], [], [], 0)[0]:
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
            os.close(self._pidfd)
            f.sweep(self._segments)
            f.sweep_session(self._session)


async def _readable(descriptor: int, timeout_s: float) -> None:
    loop = asyncio.get_running_loop()
    done = asyncio.Event()
    loop.add_reader(descriptor, done.set)
    try:
        await asyncio.wait_for(done.wait(), timeout_s)
    except asyncio.TimeoutError:
        pass
    finally:
        loop.remove_reader(descriptor)
