"""The control connections of one guardian: one that it dialled, to its leader, and those that its
followers dialled, thousands of them at a leader.

A connection begins with the handshake of `deadpool.handshake`, then each end says Hello, then
messages travel. The dialler says nothing more before it has the answerer's Hello.
"""

from __future__ import annotations

import asyncio
import enum
import errno
import logging
import socket
import typing
from collections.abc import Callable, Coroutine
from typing import Any

from deadpool.handshake import (
    HANDSHAKE_TIMEOUT_S,
    MAX_IN_HANDSHAKE,
    Acceptor,
    Dialer,
    NotOfThisJob,
    Purpose,
    RefusalLog,
)
from deadpool.messages import (
    MAX_HELLO_BYTES,
    MAX_MESSAGE_BYTES,
    Downstream,
    Hello,
    Upstream,
    WireError,
    encode,
)
from deadpool.protocol.events import (
    Dead,
    Event,
    FollowerGone,
    FromFollower,
    FromLeader,
    LeaderGone,
)
from deadpool.protocol.types import Member, MemberId
from deadpool.wire import FrameParser, family_of, parse_message, tune

logger = logging.getLogger(__name__)

MAX_PENDING_BYTES = 128 << 20
"""Of messages that a peer has not read yet: one with more is cut off."""

UNREAD_TIMEOUT_S = 20.0
"""How long sent bytes may stay unacknowledged by the peer's host."""

_BACKLOG = 4096
"""A whole job may dial a new leader at the same moment."""

_READ_BYTES = 256 << 10

_ACCEPT_PAUSE_S = 1.0
"""After accepting failed, as for want of file descriptors."""

_UPSTREAM = frozenset(typing.get_args(Upstream))
_DOWNSTREAM = frozenset(typing.get_args(Downstream))
_NOBODY_THERE = frozenset({errno.ECONNREFUSED, errno.EHOSTUNREACH, errno.ENETUNREACH})


class Stage(enum.Enum):
    """Where one connection is."""

    PROVING = "proving"
    """Is being made, or neither end has proved itself to the other."""
    GREETING = "greeting"
    """The other end is of this job and has not said who it is."""
    OPEN = "open"
    """Messages travel."""
    FAILED = "failed"
    """Broken, which is not reported yet. Nothing is taken from it."""
    RETIRED = "retired"
    """Reported, or of no more interest. Nothing is taken from it."""


_LIVE = (Stage.PROVING, Stage.GREETING, Stage.OPEN)


class _Connection(asyncio.BufferedProtocol):
    """Handshake, greeting and frames; a subclass says what they mean.

    A transport calls back from the event loop only, so that neither `send` nor `retire` reports
    anything before it returns.
    """

    takes: frozenset[type] = frozenset()
    """Types of message taken once it is open."""

    def __init__(self, peers: Peers, handshake: Dialer | Acceptor) -> None:
        self.peers = peers
        self.stage = Stage.PROVING
        self.closed: asyncio.Future[None] = peers.loop.create_future()
        """Done when the transport has let go of the socket."""
        self._handshake = handshake
        self._parser = FrameParser(MAX_HELLO_BYTES)
        self._transport: asyncio.Transport | None = None
        self._reason = ""
        self._timer: asyncio.TimerHandle | None = peers.loop.call_later(
            peers.handshake_timeout_s, self._expire
        )
        peers.connections.add(self)

    # For subclasses

    def greeted(self, member: Member) -> None:
        """It is open."""
        raise NotImplementedError

    def take(self, message: Any) -> None:
        raise NotImplementedError

    def ended(self, reason: str) -> None:
        """It failed. Called once, by the loop; not after `retire`."""
        raise NotImplementedError

    def refused(self, kind: str, detail: str = "") -> None:
        """The other end was cut off for what it sent, or did not send."""
        self.peers.refusals.note(self.host, kind, detail)

    def give_up_making(self) -> None:
        """It failed or was retired before it had a socket; `made` is still to come."""

    # For Peers

    def made(self, task: asyncio.Task[Any]) -> None:
        """The task that makes the connection is done."""
        if not task.cancelled() and (error := task.exception()) is not None:
            words = getattr(error, "strerror", None) or str(error) or type(error).__name__
            self.fail(f"cannot connect: {words}")
        if self._transport is None:
            self._finish()

    @property
    def host(self) -> str:
        """The other end's address."""
        name = self._transport.get_extra_info("peername") if self._transport else None
        return name[0] if name else "an unknown address"

    def send(self, frame: bytes) -> None:
        """Lost when the connection is not open."""
        if self.stage is Stage.OPEN:
            assert self._transport is not None
            self._transport.write(frame)

    def fail(self, reason: str) -> None:
        """Cut it off; `ended` follows from the loop."""
        if self.stage not in _LIVE:
            return
        self.stage, self._reason = Stage.FAILED, reason
        self._stop_timer()
        if self._transport is not None:
            self._transport.abort()
        else:
            self.give_up_making()

    def retire(self, flush_timeout_s: float) -> None:
        """Bring what was sent to the other end, then close. Nothing is taken or reported."""
        if self.stage is Stage.RETIRED:
            return
        was, self.stage = self.stage, Stage.RETIRED
        self._stop_timer()
        if self._transport is None:
            self.give_up_making()
        elif was is Stage.OPEN:
            # Closed at once with bytes unread here, TCP would reset the connection and could lose
            # what the other end has not read; it closes when it has read to the end.
            try:
                self._transport.write_eof()
            except OSError:
                self._transport.abort()  # The other end has reset it.
            self._timer = self.peers.loop.call_later(flush_timeout_s, self._transport.abort)
        else:
            self._transport.abort()

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def report_now(self) -> None:
        """`ended`, and what the transport says later is of no interest. Called by the loop."""
        if self.stage is Stage.FAILED:
            self.stage = Stage.RETIRED
            self.ended(self._reason)

    # asyncio.BufferedProtocol: a Protocol's 256 KiB of fresh memory for every heartbeat cost 28 of
    # 43 us of CPU (Python 3.11).

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        if self.stage not in _LIVE:
            transport.abort()
            return
        transport.set_write_buffer_limits(high=MAX_PENDING_BYTES)
        try:
            tune(transport.get_extra_info("socket"), unread_timeout_s=UNREAD_TIMEOUT_S)
        except OSError:
            pass  # It is broken already, as the next callback will say.
        if isinstance(self._handshake, Dialer):
            transport.write(self._handshake.opening)

    def get_buffer(self, sizehint: int) -> memoryview:
        return self.peers.incoming

    def buffer_updated(self, num_bytes: int) -> None:
        data = bytes(self.peers.incoming[:num_bytes])
        if self.stage is Stage.PROVING:
            data = self._prove(data)
        if self.stage not in _LIVE:
            return
        self._parser.push(data)
        try:
            while self.stage in _LIVE and (body := self._parser.pop()) is not None:
                self._take_body(body)
        except WireError as error:
            self.refused("it sent no message of this protocol", str(error))
            self.fail(str(error))

    def eof_received(self) -> None:
        self.fail("the connection ended")
        self.abort()

    def pause_writing(self) -> None:
        self.fail(f"it does not read: more than {MAX_PENDING_BYTES} bytes are pending")

    def connection_lost(self, error: Exception | None) -> None:
        if self.stage in _LIVE:
            self.fail(f"the connection ended: {error}" if error else "the connection ended")
        self._finish()

    def _prove(self, data: bytes) -> bytes:
        """Returns what came after the handshake."""
        assert self._transport is not None
        try:
            reply = self._handshake.receive(data)
        except NotOfThisJob as error:
            self.refused(str(error))
            self.fail(str(error))
            return b""
        if reply:
            self._transport.write(reply)
        if self._handshake.wanted == 0:
            assert self.peers.hello, "Peers.introduce comes first"
            self.stage = Stage.GREETING
            self._transport.write(self.peers.hello)
        return self._handshake.rest

    def _take_body(self, body: bytearray) -> None:
        message = parse_message(body)
        if self.stage is Stage.GREETING and isinstance(message, Hello):
            self.stage = Stage.OPEN
            self._parser.max_bytes = MAX_MESSAGE_BYTES
            self.greeted(message.member)
        elif self.stage is Stage.OPEN and type(message) in self.takes:
            self.take(message)
        else:
            raise WireError(f"{type(message).__name__} out of place")

    def _expire(self) -> None:
        self.refused("its handshake took too long")
        self.fail(f"no answer within {self.peers.handshake_timeout_s:g} s")

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _finish(self) -> None:
        self._stop_timer()
        self.peers.connections.discard(self)
        if not self.closed.done():
            self.closed.set_result(None)
        self.report_now()


class _Inbound(_Connection):
    """It counts as its member's from its first message on: a greeting alone is somebody's
    `find_contact`."""

    takes = _UPSTREAM

    def __init__(self, peers: Peers) -> None:
        super().__init__(peers, Acceptor(peers.token, Purpose.CONTROL))
        self.sender: MemberId | None = None
        self._counts = False
        peers.strangers.add(self)

    def greeted(self, member: Member) -> None:
        self.sender = member.member

    def take(self, message: Upstream) -> None:
        assert self.sender is not None
        if not self._counts:
            self._counts = True
            self._stop_timer()
            self.peers.admit(self)
            if self.stage is not Stage.OPEN:
                return  # What its predecessor's end led to ended it as well.
        self.peers.deliver(FromFollower(sender=self.sender, message=message))

    def ended(self, reason: str) -> None:
        if self._counts:
            assert self.sender is not None
            if self.peers.followers.get(self.sender) is self:
                del self.peers.followers[self.sender]
            self.peers.deliver(FollowerGone(sender=self.sender, reason=reason))

    def _finish(self) -> None:
        self.peers.dismiss_stranger(self)
        super()._finish()


class _Outbound(_Connection):
    """It dials when constructed."""

    def __init__(self, peers: Peers, address: tuple[str, int]) -> None:
        super().__init__(peers, Dialer(peers.token, Purpose.CONTROL))
        # Bounded by the timer.
        self._dialling = peers.make(self, peers.loop.create_connection(lambda: self, *address))

    def give_up_making(self) -> None:
        self._dialling.cancel()

    def refused(self, kind: str, detail: str = "") -> None:
        """Whoever dialled is told, and says it."""


class _ToLeader(_Outbound):
    takes = _DOWNSTREAM

    def __init__(self, peers: Peers, leader: Member) -> None:
        super().__init__(peers, (leader.host, leader.control_port))
        self.leader = leader.member
        self._queue: list[bytes] = []
        self._queued_bytes = 0

    def send(self, frame: bytes) -> None:
        if self.stage not in (Stage.PROVING, Stage.GREETING):
            super().send(frame)
            return
        self._queue.append(frame)
        self._queued_bytes += len(frame)
        if self._queued_bytes > MAX_PENDING_BYTES:
            self.pause_writing()

    def greeted(self, member: Member) -> None:
        if member.member != self.leader:
            self.fail(f"member {member.member} answers where {self.leader} was")
            return
        self._stop_timer()
        queue, self._queue = self._queue, []
        for frame in queue:
            super().send(frame)

    def take(self, message: Downstream) -> None:
        self.peers.deliver(FromLeader(sender=self.leader, message=message))

    def ended(self, reason: str) -> None:
        self._queue.clear()
        if self.peers.to_whom is self:
            self.peers.to_whom = None
        self.peers.deliver(LeaderGone(sender=self.leader, reason=reason))


class _ToContact(_Outbound):
    def __init__(self, peers: Peers, address: tuple[str, int]) -> None:
        super().__init__(peers, address)
        self.found: asyncio.Future[Member] = peers.loop.create_future()

    def greeted(self, member: Member) -> None:
        if not self.found.done():
            self.found.set_result(member)

    def retire(self, flush_timeout_s: float) -> None:
        self.ended("this guardian closes its connections")
        super().retire(flush_timeout_s)

    def ended(self, reason: str) -> None:
        if not self.found.done():
            self.found.set_exception(WireError(reason))


class Peers:
    """Every method runs on the event loop, and the constructor while it runs.

    deliver: told every event, in order, from callbacks of the loop: never before a method of this
    class has returned, and never after `close` was called. It must not raise.
    """

    def __init__(
        self,
        *,
        token: bytes,
        deliver: Callable[[Event], None],
        handshake_timeout_s: float = HANDSHAKE_TIMEOUT_S,
    ) -> None:
        self.token = token
        self.handshake_timeout_s = handshake_timeout_s
        self.loop = asyncio.get_running_loop()
        self.hello = b""
        self.incoming = memoryview(bytearray(_READ_BYTES))
        """What the loop reads into, for every connection: it is taken before the next read."""
        self.refusals = RefusalLog(logger)
        self.connections: set[_Connection] = set()
        """All whose socket is open, and those being dialled."""
        self.followers: dict[MemberId, _Inbound] = {}
        self.strangers: set[_Inbound] = set()
        """Inbound ones from which no message has come."""
        self.to_whom: _ToLeader | None = None
        self._deliver = deliver
        self._listener: socket.socket | None = None
        self._probes: set[asyncio.Task[None]] = set()
        self._closing = False

    def introduce(self, me: Member) -> None:
        """Who Hello says this guardian is. Comes before any connection."""
        self.hello = encode(Hello(member=me))

    async def listen(self, host: str, port: int = 0) -> int:
        """Take followers from now on; returns the port. Raises OSError."""
        self._listener = socket.create_server(
            (host, port), family=family_of(host), backlog=_BACKLOG
        )
        self._listener.setblocking(False)
        self._resume_accepting()
        return int(self._listener.getsockname()[1])

    def to_followers(self, members: tuple[MemberId, ...], message: Downstream) -> None:
        """To each on the connection that it dialled; lost where there is none."""
        frame = encode(message)
        for member in members:
            connection = self.followers.get(member)
            if connection is not None:
                connection.send(frame)

    def to_leader(self, leader: Member, message: Upstream) -> None:
        """On the connection to `leader`, dialled if need be; one to another member is closed in
        silence. LeaderGone when it fails: what was sent may be lost then."""
        if self._closing:
            return
        connection = self.to_whom
        if connection is None or connection.leader != leader.member:
            if connection is not None:
                connection.retire(self.handshake_timeout_s)
            connection = self.to_whom = _ToLeader(self, leader)
        connection.send(encode(message))

    def hang_up(self, members: tuple[MemberId, ...]) -> None:
        """Close what these members dialled, after what was sent to them; no FollowerGone."""
        for member in members:
            connection = self.followers.pop(member, None)
            if connection is not None:
                connection.retire(self.handshake_timeout_s)

    def cut_off(self, event: FromFollower | FromLeader, reason: str) -> None:
        """Fail the connection that this came on; its end is reported like any other."""
        connection: _Connection | None = self.to_whom
        if isinstance(event, FromFollower):
            connection = self.followers.get(event.sender)
        if connection is not None:
            self.refusals.note(connection.host, "it broke the protocol", reason)
            connection.fail(reason)

    async def find_contact(self, address: tuple[str, int]) -> Member:
        """The member of this job that answers there. Raises WireError."""
        if self._closing:
            raise WireError("this guardian is closing its connections")
        connection = _ToContact(self, address)
        try:
            return await connection.found
        finally:
            connection.retire(0.0)

    def probe(self, member: Member) -> None:
        """Dead is delivered if the member's host, or the way to it, says that nobody is there."""
        if not self._closing:
            task = self.loop.create_task(self._probe(member))
            self._probes.add(task)
            task.add_done_callback(self._probes.discard)

    async def close(self, flush_timeout_s: float = 1.0) -> None:
        """Bring what was sent to the others' hosts, for at most so long, and close everything."""
        self._closing = True
        if self._listener is not None:
            self.loop.remove_reader(self._listener)
            self._listener.close()
            self._listener = None
        probes = list(self._probes)
        for task in probes:
            task.cancel()
        for connection in list(self.connections):
            connection.retire(flush_timeout_s)
        await self._wait_closed(flush_timeout_s)
        for connection in self.connections:
            connection.abort()
        await self._wait_closed(None)
        await asyncio.gather(*probes, return_exceptions=True)

    # For connections

    def deliver(self, event: Event) -> None:
        if not self._closing:
            self._deliver(event)

    def make(
        self, connection: _Connection, coroutine: Coroutine[Any, Any, Any]
    ) -> asyncio.Task[Any]:
        """`coroutine` gives the connection its transport."""
        task = self.loop.create_task(coroutine)
        task.add_done_callback(connection.made)
        return task

    def admit(self, connection: _Inbound) -> None:
        """From now on it is its member's; the end of an older one is reported before."""
        self.dismiss_stranger(connection)
        assert connection.sender is not None
        older = self.followers.get(connection.sender)
        if older is not None:
            older.fail("it has dialled again")
            older.report_now()
        self.followers[connection.sender] = connection

    def dismiss_stranger(self, connection: _Inbound) -> None:
        was_full = len(self.strangers) >= MAX_IN_HANDSHAKE
        self.strangers.discard(connection)
        if was_full:
            self._resume_accepting()

    # Accepting

    def _resume_accepting(self) -> None:
        if self._listener is not None:
            self.loop.add_reader(self._listener, self._accept)

    def _accept(self) -> None:
        """While there is room for strangers; others wait in the kernel's queue, so that a job
        which dials at once gets in one after the other, and nobody is refused."""
        assert self._listener is not None
        while len(self.strangers) < MAX_IN_HANDSHAKE:
            try:
                sock, _ = self._listener.accept()
            except (BlockingIOError, ConnectionAbortedError):
                return
            except OSError as error:
                logger.error("cannot accept connections: %s", error)
                self.loop.remove_reader(self._listener)
                self.loop.call_later(_ACCEPT_PAUSE_S, self._resume_accepting)
                return
            sock.setblocking(False)
            self._attach(_Inbound(self), sock)
        self.loop.remove_reader(self._listener)

    def _attach(self, connection: _Inbound, sock: socket.socket) -> None:
        self.make(connection, self.loop.connect_accepted_socket(lambda: connection, sock))

    # Probing and closing

    async def _probe(self, member: Member) -> None:
        address = (member.host, member.control_port)
        try:
            dialled = self.loop.create_connection(asyncio.Protocol, *address)
            transport, _ = await asyncio.wait_for(dialled, self.handshake_timeout_s)
        except asyncio.TimeoutError:
            return
        except OSError as error:
            if error.errno in _NOBODY_THERE:
                self.deliver(Dead(member=member.member))
            return
        transport.abort()

    async def _wait_closed(self, timeout_s: float | None) -> None:
        waited = [connection.closed for connection in self.connections]
        if waited:
            await asyncio.wait(waited, timeout=timeout_s)
