"""Control connections over loopback: what is delivered, in which order, and what never is."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import itertools
import os
import socket
import struct
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from typing import Any

import pytest

from deadpool import messages as m
from deadpool import peers as peers_module
from deadpool.handshake import Dialer, Purpose
from deadpool.peers import Peers
from deadpool.protocol.events import (
    Dead,
    Event,
    FollowerGone,
    FromFollower,
    FromLeader,
    LeaderGone,
)
from deadpool.protocol.types import Epoch, Iteration, Member, MemberId, Node
from deadpool.wire import WireError, read_message

TOKEN = b"0123456789abcdef"
HOST = "127.0.0.1"
BOUND_S = 60.0
"""Of a whole test: only a hang takes so long."""

numbers = itertools.count(1)


def member_at(port: int, number: int | None = None) -> Member:
    number = next(numbers) if number is None else number
    return Member(
        member=MemberId(number),
        node=Node(number),
        local_rank=0,
        host=HOST,
        control_port=port,
        data_port=1,
    )


class Guardian:
    """Peers, what they deliver, and a check that they never do so while they are called."""

    def __init__(self, token: bytes = TOKEN, handshake_timeout_s: float = 30.0) -> None:
        self.events: list[Event] = []
        self.react: Callable[[Event], None] = lambda event: None
        self.peers = Peers(
            token=token, deliver=self.deliver, handshake_timeout_s=handshake_timeout_s
        )
        self.port = 0
        self._called = False
        self._changed = asyncio.Event()

    async def begin(self, number: int | None = None) -> None:
        self.port = await self.peers.listen(HOST)
        self.member = member_at(self.port, number)
        self.id = self.member.member
        self.peers.introduce(self.member)

    def deliver(self, event: Event) -> None:
        assert not self._called, f"{event} while a method runs"
        self.events.append(event)
        self._changed.set()
        self.react(event)

    def call(self, method: Callable[..., None], *arguments: Any) -> None:
        was, self._called = self._called, True
        method(*arguments)
        self._called = was

    def to_leader(self, leader: Guardian | Member, message: Any = None) -> None:
        leader = leader if isinstance(leader, Member) else leader.member
        message = m.Join(member=self.member) if message is None else message
        self.call(self.peers.to_leader, leader, message)

    def to(self, *followers: Guardian, message: Any = None) -> None:
        ids = tuple(follower.id for follower in followers)
        self.call(self.peers.to_followers, ids, m.Welcome() if message is None else message)

    async def until(self, number: int) -> list[Event]:
        """The events, once there are so many."""
        while len(self.events) < number:
            self._changed.clear()
            await self._changed.wait()
        return self.events

    async def undisturbed(self) -> None:
        """Nothing more has come by the time a fresh follower's message has."""
        before = len(self.events)
        async with guardians(1) as (witness,):
            witness.to_leader(self, m.DrainWanted())
            assert await self.until(before + 1) == [
                *self.events[:before],
                FromFollower(sender=witness.id, message=m.DrainWanted()),
            ]
            self.call(self.peers.hang_up, (witness.id,))
        self.events.pop()


@contextlib.asynccontextmanager
async def guardians(number: int, **settings: Any) -> AsyncIterator[list[Guardian]]:
    running = [Guardian(**settings) for _ in range(number)]
    for guardian in running:
        await guardian.begin()
    try:
        yield running
    finally:
        for guardian in running:
            await guardian.peers.close(0.2)


def run(test: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Run to its end and see that no task and no descriptor is left, and no callback failed."""
    errors: list[dict[str, Any]] = []

    async def bounded() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, error: errors.append(error))
        await asyncio.wait_for(test(), BOUND_S)
        assert asyncio.all_tasks() == {asyncio.current_task()}

    before = len(os.listdir("/proc/self/fd"))
    asyncio.run(bounded())
    assert len(os.listdir("/proc/self/fd")) == before
    assert errors == []


class Raw:
    """A dialler that says what it likes."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    @classmethod
    async def connect(cls, guardian: Guardian) -> Raw:
        return cls(*await asyncio.open_connection(HOST, guardian.port))

    @classmethod
    async def prove(cls, guardian: Guardian) -> Raw:
        raw = await cls.connect(guardian)
        dialer = Dialer(TOKEN, Purpose.CONTROL)
        raw.writer.write(dialer.opening)
        raw.writer.write(dialer.receive(await raw.reader.readexactly(dialer.wanted)))
        assert await read_message(raw.reader) == m.Hello(member=guardian.member)
        return raw

    @classmethod
    async def greet(cls, guardian: Guardian, member: Member) -> Raw:
        raw = await cls.prove(guardian)
        raw.send(m.Hello(member=member))
        return raw

    def send(self, *messages: Any) -> None:
        self.writer.write(b"".join(m.encode(message) for message in messages))

    async def ended(self) -> bytes:
        """What came until the other side closed."""
        received = b""
        try:
            while data := await self.reader.read(1 << 16):
                received += data
        except ConnectionResetError:
            pass
        self.close()
        return received

    def close(self) -> None:
        self.writer.close()


def staged(iteration: int) -> m.Staged:
    return m.Staged(epoch=Epoch(1), iteration=Iteration(iteration))


# Leaders and followers


def test_messages_arrive_both_ways_in_order_those_queued_while_dialling_first() -> None:
    async def test() -> None:
        async with guardians(2) as (leader, follower):
            for iteration in range(100):
                follower.to_leader(leader, staged(iteration))
            await leader.until(1)
            for iteration in range(100, 200):
                follower.to_leader(leader, staged(iteration))
            assert await leader.until(200) == [
                FromFollower(sender=follower.id, message=staged(i)) for i in range(200)
            ]
            leader.to(follower)
            leader.to(follower, message=m.Drain())
            assert await follower.until(2) == [
                FromLeader(sender=leader.id, message=m.Welcome()),
                FromLeader(sender=leader.id, message=m.Drain()),
            ]
            assert len(leader.peers.connections) == len(follower.peers.connections) == 1

    run(test)


def test_message_of_many_megabytes_arrives_whole() -> None:
    async def test() -> None:
        async with guardians(2) as (leader, follower):
            message = m.Failed(reason="x" * 10_000_000, exit_code=1)
            follower.to_leader(leader, message)
            follower.to_leader(leader, m.Heartbeat())
            assert await leader.until(2) == [
                FromFollower(sender=follower.id, message=message),
                FromFollower(sender=follower.id, message=m.Heartbeat()),
            ]

    run(test)


def test_many_followers_at_once_all_get_in_and_all_are_reached(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(peers_module, "MAX_IN_HANDSHAKE", 8)

    async def test() -> None:
        async with guardians(1) as (leader,), guardians(60) as followers:
            for follower in followers:
                follower.to_leader(leader)
            assert {event.sender for event in await leader.until(60)} == {  # type: ignore[union-attr]
                follower.id for follower in followers
            }
            leader.to(*followers)
            for follower in followers:
                await follower.until(1)
            assert leader.peers.strangers == set()

    run(test)


def test_message_to_who_has_not_dialled_is_dropped() -> None:
    async def test() -> None:
        async with guardians(2) as (leader, follower):
            leader.to(follower)
            follower.to_leader(leader)
            await leader.until(1)
            leader.to(follower, message=m.Drain())
            assert await follower.until(1) == [FromLeader(sender=leader.id, message=m.Drain())]

    run(test)


def test_other_leader_takes_over_in_silence_and_the_old_one_hears_of_the_end() -> None:
    async def test() -> None:
        async with guardians(3) as (first, second, follower):
            follower.to_leader(first)
            await first.until(1)
            follower.to_leader(first, staged(1))
            follower.to_leader(second)
            await second.until(1)
            second.to(follower)
            assert await first.until(3) == [
                FromFollower(sender=follower.id, message=m.Join(member=follower.member)),
                FromFollower(sender=follower.id, message=staged(1)),
                FollowerGone(sender=follower.id, reason="the connection ended"),
            ]
            assert await follower.until(1) == [FromLeader(sender=second.id, message=m.Welcome())]

    run(test)


def test_leader_changed_while_dialling_leaves_nothing_of_the_first() -> None:
    async def test() -> None:
        async with guardians(3) as (first, second, follower):
            follower.to_leader(first)
            follower.to_leader(second)
            follower.to_leader(first)
            follower.to_leader(second)
            await second.until(1)
            await second.undisturbed()
            await first.undisturbed()
            await follower.undisturbed()
            assert len(second.events) == 1 and first.events == follower.events == []

    run(test)


def test_leader_that_closes_is_reported_gone_and_can_be_dialled_again() -> None:
    async def test() -> None:
        async with guardians(2) as (leader, follower):
            follower.to_leader(leader)
            await leader.until(1)
            leader.call(leader.peers.hang_up, (follower.id,))
            assert await follower.until(1) == [
                LeaderGone(sender=leader.id, reason="the connection ended")
            ]
            follower.to_leader(leader, staged(1))
            assert (await leader.until(2))[1] == FromFollower(sender=follower.id, message=staged(1))

    run(test)


def free_port() -> int:
    with socket.create_server((HOST, 0)) as server:
        return int(server.getsockname()[1])


@contextlib.contextmanager
def full_listener() -> Iterator[int]:
    """A port whose queue is full: the kernel drops what comes, as a lossy network does."""
    with socket.create_server((HOST, 0), backlog=0) as server, contextlib.ExitStack() as stack:
        for _ in range(3):
            dialling = stack.enter_context(socket.socket())
            dialling.setblocking(False)
            dialling.connect_ex(server.getsockname())
        yield server.getsockname()[1]


def test_leader_that_cannot_be_reached_is_reported_gone_within_the_bound() -> None:
    async def test() -> None:
        async with guardians(1, handshake_timeout_s=0.2) as (follower,):
            with full_listener() as port:
                leader = member_at(port)
                follower.to_leader(leader)
                assert await follower.until(1) == [
                    LeaderGone(sender=leader.member, reason="no answer within 0.2 s")
                ]

    run(test)


def test_leader_that_cannot_be_reached_is_left_for_another_and_at_close() -> None:
    async def test() -> None:
        async with guardians(2) as (leader, follower):
            with full_listener() as port:
                follower.to_leader(member_at(port))
                await asyncio.sleep(0)
                follower.to_leader(leader)
                await leader.until(1)
                assert len(follower.peers.connections) == 1
                follower.to_leader(member_at(port))
                await asyncio.sleep(0)
                await follower.peers.close(0.1)
                assert follower.events == []

    run(test)


def test_leader_where_nobody_listens_is_reported_gone() -> None:
    async def test() -> None:
        async with guardians(1) as (follower,):
            nobody = member_at(free_port())
            for number in (1, 2):
                follower.to_leader(nobody)
                (*_, event) = await follower.until(number)
                assert isinstance(event, LeaderGone) and event.sender == nobody.member
                assert "Connect call failed" in event.reason or "refused" in event.reason

    run(test)


def test_leader_of_another_id_is_reported_gone_and_hears_nothing() -> None:
    async def test() -> None:
        async with guardians(2) as (other, follower):
            expected = member_at(other.port)
            follower.to_leader(expected)
            (event,) = await follower.until(1)
            assert event == LeaderGone(
                sender=expected.member,
                reason=f"member {other.id} answers where {expected.member} was",
            )
            await other.undisturbed()
            assert other.events == []

    run(test)


def test_wrong_token_is_reported_gone_and_the_other_side_hears_nothing() -> None:
    async def test() -> None:
        async with guardians(1) as (leader,), guardians(1, token=b"another's") as (stranger,):
            stranger.to_leader(leader)
            (event,) = await stranger.until(1)
            assert isinstance(event, LeaderGone) and "token" in event.reason
            with pytest.raises(WireError, match="token"):
                await stranger.peers.find_contact((HOST, leader.port))
            await leader.undisturbed()
            assert leader.events == []

    run(test)


def test_leader_that_is_silent_is_reported_gone_within_the_bound() -> None:
    async def test() -> None:
        async with guardians(1, handshake_timeout_s=0.2) as (follower,):
            with socket.create_server((HOST, 0)) as silent:
                leader = member_at(silent.getsockname()[1])
                follower.to_leader(leader)
                assert await follower.until(1) == [
                    LeaderGone(sender=leader.member, reason="no answer within 0.2 s")
                ]
                with pytest.raises(WireError, match=r"within 0\.2 s"):
                    await follower.peers.find_contact((HOST, leader.control_port))

    run(test)


def test_follower_that_ends_is_reported_gone() -> None:
    async def test() -> None:
        async with guardians(1) as (leader,):
            async with guardians(1) as (follower,):
                follower.to_leader(leader)
                await leader.until(1)
            assert (await leader.until(2))[1] == FollowerGone(
                sender=follower.id, reason="the connection ended"
            )
            leader.to(follower)

    run(test)


def test_second_connection_of_a_member_ends_the_first_before_anything_of_it_counts() -> None:
    async def test() -> None:
        async with guardians(1) as (leader,):
            me = member_at(1)
            old, new = await Raw.greet(leader, me), await Raw.greet(leader, me)
            old.send(staged(1))
            await leader.until(1)
            new.send(staged(2), staged(3))
            assert await leader.until(4) == [
                FromFollower(sender=me.member, message=staged(1)),
                FollowerGone(sender=me.member, reason="it has dialled again"),
                FromFollower(sender=me.member, message=staged(2)),
                FromFollower(sender=me.member, message=staged(3)),
            ]
            assert await old.ended() == b""
            leader.call(leader.peers.to_followers, (me.member,), m.Drain())
            assert await read_message(new.reader) == m.Drain()
            new.close()
            assert (await leader.until(5))[4:] == [
                FollowerGone(sender=me.member, reason="the connection ended")
            ]

    run(test)


# Hanging up


def test_hang_up_brings_what_was_sent_and_reports_nothing_here() -> None:
    async def test() -> None:
        async with guardians(2) as (leader, follower):
            follower.to_leader(leader)
            await leader.until(1)
            # Unread at the leader when it closes: TCP must not answer them with a reset.
            for iteration in range(1000):
                follower.to_leader(leader, staged(iteration))
            big = m.Fenced(reason="x" * 5_000_000)
            leader.to(follower, message=big)
            leader.call(leader.peers.hang_up, (follower.id, MemberId(0)))
            assert await follower.until(2) == [
                FromLeader(sender=leader.id, message=big),
                LeaderGone(sender=leader.id, reason="the connection ended"),
            ]
            await leader.undisturbed()
            assert len(leader.events) == 1

    run(test)


def test_hang_up_and_send_after_a_reset_that_the_loop_has_not_seen_are_harmless() -> None:
    async def test() -> None:
        for method in ("to_followers", "hang_up", "both"):
            async with guardians(1) as (leader,):
                me = member_at(1)
                sock = await asyncio.to_thread(blocking_dial, leader, me)
                await leader.until(1)
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                sock.close()
                if method != "hang_up":
                    leader.call(leader.peers.to_followers, (me.member,), m.Drain())
                if method != "to_followers":
                    leader.call(leader.peers.hang_up, (me.member,))
                    await leader.undisturbed()
                    assert len(leader.events) == 1
                else:
                    assert isinstance((await leader.until(2))[1], FollowerGone)

    run(test)


def blocking_dial(guardian: Guardian, me: Member) -> socket.socket:
    """A follower that has sent one message."""
    sock = socket.create_connection((HOST, guardian.port))
    dialer = Dialer(TOKEN, Purpose.CONTROL)
    sock.sendall(dialer.opening)
    sock.sendall(dialer.receive(sock.recv(dialer.wanted, socket.MSG_WAITALL)))
    sock.sendall(m.encode(m.Hello(member=me)) + m.encode(m.Heartbeat()))
    hello = m.encode(m.Hello(member=guardian.member))
    assert sock.recv(len(hello), socket.MSG_WAITALL) == hello
    return sock


def test_hang_up_from_an_event_drops_what_came_with_it(caplog: pytest.LogCaptureFixture) -> None:
    async def test() -> None:
        async with guardians(1) as (leader,):
            me = member_at(1)
            raw = await Raw.greet(leader, me)

            def react(event: Event) -> None:
                assert isinstance(event, FromFollower)
                leader.peers.to_followers((event.sender,), m.Leave())
                leader.peers.hang_up((event.sender,))

            leader.react = react
            raw.send(staged(1), staged(2), staged(3))
            assert await raw.ended() == m.encode(m.Leave())
            leader.react = lambda event: None
            await leader.undisturbed()
            assert leader.events == [FromFollower(sender=me.member, message=staged(1))]

    run(test)
    assert not [r for r in caplog.records if "refused" in r.getMessage()]


# Contacts and probes


def test_contact_is_found_and_does_not_disturb_what_the_seeker_has_there() -> None:
    async def test() -> None:
        async with guardians(2) as (leader, follower):
            follower.to_leader(leader)
            await leader.until(1)
            assert await follower.peers.find_contact((HOST, leader.port)) == leader.member
            await leader.undisturbed()
            leader.to(follower)
            await follower.until(1)
            assert len(leader.events) == 1
            with pytest.raises(WireError, match="cannot connect"):
                await follower.peers.find_contact((HOST, free_port()))

    run(test)


@pytest.mark.parametrize("answer", [b"220 mail\r\n", b""])
def test_contact_that_speaks_something_else_or_hangs_up_raises_wire_error(answer: bytes) -> None:
    async def test() -> None:
        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(answer)
            writer.close()
            served.set()

        served = asyncio.Event()
        server = await asyncio.start_server(serve, HOST, 0)
        async with guardians(1) as (seeker,):
            port = server.sockets[0].getsockname()[1]
            with pytest.raises(WireError, match="another protocol" if answer else "ended"):
                await seeker.peers.find_contact((HOST, port))
            await served.wait()
        server.close()
        await server.wait_closed()

    run(test)


def test_contact_sought_is_given_up_when_the_seeker_is_cancelled() -> None:
    async def test() -> None:
        async with guardians(1) as (seeker,):
            with socket.create_server((HOST, 0)) as silent:
                address = (HOST, silent.getsockname()[1])
                with pytest.raises(asyncio.TimeoutError):
                    await asyncio.wait_for(seeker.peers.find_contact(address), 0.1)

    run(test)


def test_probe_of_a_dead_process_says_so_and_of_a_live_one_nothing() -> None:
    async def test() -> None:
        async with guardians(2) as (prober, alive):
            with socket.create_server((HOST, 0)) as hung:
                dead = member_at(free_port())
                prober.call(prober.peers.probe, alive.member)
                prober.call(prober.peers.probe, member_at(hung.getsockname()[1]))
                prober.call(prober.peers.probe, dead)
                await prober.until(1)
                while prober.peers._probes:
                    await asyncio.sleep(0)
                await alive.undisturbed()
                assert prober.events == [Dead(member=dead.member)] and alive.events == []

    run(test)


def test_probe_that_learns_nothing_says_nothing() -> None:
    async def test() -> None:
        async with guardians(1, handshake_timeout_s=0.2) as (prober,):
            with full_listener() as port:
                prober.call(prober.peers.probe, member_at(port))
                while prober.peers._probes:
                    await asyncio.sleep(0.01)
                assert prober.events == []

    run(test)


@pytest.mark.parametrize(
    ("code", "is_dead"),
    [
        (errno.ECONNREFUSED, True),
        (errno.EHOSTUNREACH, True),
        (errno.ENETUNREACH, True),
        (errno.ETIMEDOUT, False),
        (errno.EADDRNOTAVAIL, False),
        (errno.EMFILE, False),
    ],
)
def test_probe_goes_by_what_the_kernel_says(
    code: int, is_dead: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail(*_: Any) -> None:
        raise OSError(code, os.strerror(code))

    async def test() -> None:
        async with guardians(1) as (prober,):
            monkeypatch.setattr(prober.peers.loop, "create_connection", fail)
            member = member_at(1)
            prober.call(prober.peers.probe, member)
            while prober.peers._probes:
                await asyncio.sleep(0)
            assert prober.events == ([Dead(member=member.member)] if is_dead else [])

    run(test)


# Strangers, and members that misbehave


def oversized(num_bytes: int) -> bytes:
    return num_bytes.to_bytes(4, "little")


@pytest.mark.parametrize(
    "garbage",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        b"\xff" * 300_000,
        m.encode(m.Hello(member=member_at(1, 1))),
        oversized(64 << 20),
        b"DEADPOOL\x01" + bytes(200_000),
    ],
    ids=["http", "bytes", "hello", "length", "much"],
)
def test_stranger_is_cut_off_said_once_and_disturbs_nothing(
    garbage: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    async def test() -> None:
        async with guardians(2) as (leader, follower):
            follower.to_leader(leader)
            for _ in range(3):
                raw = await Raw.connect(leader)
                raw.writer.write(garbage)
                assert await raw.ended() == b""
            follower.to_leader(leader, staged(1))
            assert [type(event) for event in await leader.until(2)] == [FromFollower] * 2

    run(test)
    assert len([r for r in caplog.records if "refused" in r.getMessage()]) == 1


@pytest.mark.parametrize(
    "sent",
    [
        m.encode(m.Heartbeat()),
        oversized(m.MAX_HELLO_BYTES + 1),
        m.encode(m.Hello(member=member_at(1, 1))).replace(HOST.encode(), b"\xff" * len(HOST)),
        b"\x02\0\0\0\xff\x80",
        b"\0\0\0\0",
    ],
    ids=["message", "length", "text", "type", "empty"],
)
def test_authenticated_without_a_hello_is_cut_off(sent: bytes) -> None:
    async def test() -> None:
        async with guardians(1) as (leader,):
            raw = await Raw.prove(leader)
            raw.writer.write(sent)
            assert await raw.ended() == b""
            await leader.undisturbed()
            assert leader.events == []

    run(test)


@pytest.mark.parametrize(
    "sent",
    [
        m.encode(m.Welcome()),
        m.encode(m.TrainerUp()),
        m.encode(m.Hello(member=member_at(1, 1))),
        m.encode(m.Answer()),
        oversized(m.MAX_MESSAGE_BYTES + 1),
        b"\x02\0\0\0\x01\xc1",
        m.encode(m.Finished(epoch=Epoch(1)))[:-1],
    ],
    ids=["downstream", "trainer", "hello", "data", "length", "fields", "cut"],
)
def test_member_that_sends_what_it_must_not_is_cut_off_and_reported(sent: bytes) -> None:
    async def test() -> None:
        async with guardians(2) as (leader, follower):
            follower.to_leader(leader)
            await leader.until(1)
            me = member_at(1)
            raw = await Raw.greet(leader, me)
            raw.send(m.Heartbeat())
            await leader.until(2)
            raw.writer.write(sent)
            if sent[-2:] == m.encode(m.Finished(epoch=Epoch(1)))[-3:-1]:
                raw.close()
            else:
                assert await raw.ended() == b""
            gone = (await leader.until(3))[2]
            assert isinstance(gone, FollowerGone) and gone.sender == me.member
            leader.to(follower)
            await follower.until(1)
            assert len(leader.events) == 3

    run(test)


def test_leader_that_sends_what_it_must_not_is_reported_gone() -> None:
    async def test() -> None:
        async with guardians(2) as (leader, follower):
            follower.to_leader(leader)
            await leader.until(1)
            leader.to(follower, message=m.Join(member=leader.member))
            (event,) = await follower.until(1)
            assert event == LeaderGone(sender=leader.id, reason="Join out of place")

    run(test)


def test_silent_strangers_are_cut_off_within_the_bound() -> None:
    async def test() -> None:
        async with guardians(1, handshake_timeout_s=0.2) as (leader,):
            unproven, ungreeted, unsaid = (
                await Raw.connect(leader),
                await Raw.prove(leader),
                await Raw.greet(leader, member_at(1)),
            )
            unproven.writer.write(b"DEADPOOL")
            for raw in (unproven, ungreeted, unsaid):
                assert await raw.ended() == b""
            assert leader.events == [] and leader.peers.connections == set()

    run(test)


def test_open_connection_outlives_the_bound_of_the_handshake() -> None:
    async def test() -> None:
        async with guardians(1, handshake_timeout_s=0.2) as (leader,), guardians(1) as (other,):
            me = member_at(1)
            raw = await Raw.greet(leader, me)
            raw.send(staged(1))
            silent = await Raw.connect(leader)
            leader.to_leader(other)
            await silent.ended()  # Its bound began later than that of the open ones.
            raw.send(staged(2))
            assert await leader.until(2) == [
                FromFollower(sender=me.member, message=staged(1)),
                FromFollower(sender=me.member, message=staged(2)),
            ]
            raw.close()

    run(test)


def test_strangers_in_handshake_are_bounded_and_who_comes_then_waits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(peers_module, "MAX_IN_HANDSHAKE", 16)

    async def test() -> None:
        async with guardians(2) as (leader, follower):
            strangers = [await Raw.connect(leader) for _ in range(26)]
            follower.to_leader(leader)
            while len(leader.peers.strangers) < 16:
                await asyncio.sleep(0)
            for _ in range(100):
                await asyncio.sleep(0)
            assert len(leader.peers.strangers) == 16 and leader.events == []
            for stranger in strangers:
                stranger.close()
            await leader.until(1)

    run(test)


def test_follower_that_does_not_read_is_cut_off_and_others_are_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(peers_module, "MAX_PENDING_BYTES", 4 << 20)

    async def test() -> None:
        async with guardians(2) as (leader, follower):
            me = member_at(1)
            raw = await Raw.greet(leader, me)
            raw.writer.transport.pause_reading()  # type: ignore[attr-defined]
            raw.send(m.Heartbeat())
            follower.to_leader(leader)
            await leader.until(2)
            message = m.Fenced(reason="x" * 1_000_000)
            for number in range(1, 40):
                leader.to(follower, message=message)
                leader.call(leader.peers.to_followers, (me.member,), message)
                await follower.until(number)
                if len(leader.events) > 2:
                    break
            assert leader.events[2:] == [
                FollowerGone(
                    sender=me.member,
                    reason="it does not read: more than 4194304 bytes are pending",
                )
            ]
            raw.close()

    run(test)


def test_messages_queued_while_dialling_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers_module, "MAX_PENDING_BYTES", 1 << 20)

    async def test() -> None:
        async with guardians(1) as (follower,):
            with socket.create_server((HOST, 0)) as silent:
                leader = member_at(silent.getsockname()[1])
                for _ in range(3):
                    follower.to_leader(leader, m.Failed(reason="x" * 600_000, exit_code=1))
                (event,) = await follower.until(1)
                assert isinstance(event, LeaderGone) and "does not read" in event.reason

    run(test)


# Closing


def test_close_brings_what_was_sent_and_delivers_nothing_more() -> None:
    async def test() -> None:
        async with guardians(2) as (leader, follower):
            follower.to_leader(leader)
            await leader.until(1)
            big = m.Failed(reason="x" * 5_000_000, exit_code=1)
            follower.to_leader(leader, big)
            leader.to(follower)
            await follower.peers.close(30.0)
            follower.to_leader(leader)
            follower.peers.probe(member_at(free_port()))
            with pytest.raises(WireError):
                await follower.peers.find_contact((HOST, leader.port))
            assert follower.peers.connections == set()
            assert (await leader.until(3))[1:] == [
                FromFollower(sender=follower.id, message=big),
                FollowerGone(sender=follower.id, reason="the connection ended"),
            ]
            assert follower.events == []

    run(test)


def test_close_does_not_wait_longer_than_its_bound_for_who_does_not_read() -> None:
    async def test() -> None:
        async with guardians(1, handshake_timeout_s=2 * BOUND_S) as (leader,):
            me = member_at(1)
            raw = await Raw.greet(leader, me)
            raw.writer.transport.pause_reading()  # type: ignore[attr-defined]
            raw.send(m.Heartbeat())
            await leader.until(1)
            message = m.Fenced(reason="x" * 10_000_000)
            leader.call(leader.peers.to_followers, (me.member,), message)
            leader.call(leader.peers.hang_up, (me.member,))
            await leader.peers.close(0.1)  # Sooner than what was hung up would be given up.
            assert leader.peers.connections == set() and len(leader.events) == 1
            raw.close()

    run(test)


def test_close_in_the_middle_of_everything_leaves_nothing() -> None:
    async def test() -> None:
        async with guardians(2) as (leader, other):
            with socket.create_server((HOST, 0)) as silent:
                address = (HOST, silent.getsockname()[1])
                seeking = asyncio.create_task(other.peers.find_contact(address))
                raws = [await Raw.connect(other) for _ in range(5)]
                raws.append(await Raw.greet(other, member_at(1)))
                await asyncio.sleep(0)
                for target in (member_at(address[1]), leader.member):
                    other.to_leader(target)
                    other.call(other.peers.probe, target)
                late = asyncio.create_task(Raw.connect(other))
                await asyncio.sleep(0)
                await other.peers.close(0.1)
                with pytest.raises(WireError, match="closes"):
                    await seeking
                with contextlib.suppress(OSError):
                    raws.append(await late)
                for raw in raws:
                    await raw.ended()
                assert other.events == []

    run(test)


def test_close_before_anything_began_is_nothing() -> None:
    async def test() -> None:
        await Guardian().peers.close()

    run(test)
