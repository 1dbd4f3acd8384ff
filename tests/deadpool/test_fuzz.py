"""A live guardian, and strangers and liars at its ports."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from deadpool import messages as m
from deadpool.config import RankEnvironment
from deadpool.conformance import check, load
from deadpool.handshake import ANSWER_BYTES, Dialer, Purpose
from deadpool.messages import TYPES, encode
from deadpool.peers import Peers
from deadpool.protocol.events import Event, FollowerGone, FromFollower, FromLeader
from deadpool.protocol.types import (
    Epoch,
    Holdings,
    Iteration,
    Member,
    MemberId,
    Node,
    Restart,
    Roster,
    RosterId,
    Slot,
)

SCRIPT = Path(__file__).with_name("fuzzed_guardian.py")
TOKEN = "0123456789abcdef" * 2
HOST = "127.0.0.1"
SEED = 20261201
NUM_MESSAGES = 100_000
BATCH = 300
BOUND_S = 60.0
"""Of one wait: only a hang takes so long."""

FLAGS = """
    --deadpool-trace --deadpool-heartbeat-timeout 10 --deadpool-minority-timeout 60
    --deadpool-error-grace 25
""".split()


class Process:
    """A guardian of the job, in a process of its own."""

    def __init__(self, folder: Path, node: int, *, contacts: tuple[tuple[str, int], ...] = ()):
        self.state_file = folder / f"state-{node}"
        self.log = folder / f"log-{node}"
        environment = RankEnvironment(
            job_file=str(folder / "job.json"),
            contacts=contacts,
            token=TOKEN,
            forms_job=node == 0,
            node=node,
            local_rank=0,
            num_nodes=3,
            ranks_per_node=1,
            num_spare_nodes=1,
            host=HOST,
        )
        with open(self.log, "w") as log:
            self.process = subprocess.Popen(
                [sys.executable, SCRIPT, self.state_file, "--deadpool-log-dir", folder, *FLAGS],
                env={**os.environ, **environment.to_environ()},
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def state(self) -> dict[str, Any]:
        self.state_file.unlink(missing_ok=True)
        self.process.send_signal(signal.SIGUSR1)
        wait_until(self.state_file.exists, self)
        found: dict[str, Any] = json.loads(self.state_file.read_text())
        return found

    @property
    def num_log_lines(self) -> int:
        return len(self.log.read_text().splitlines())


def wait_until(holds: Callable[[], bool], guardian: Process) -> None:
    deadline = time.monotonic() + BOUND_S
    while not holds():
        assert guardian.process.poll() is None, guardian.log.read_text()[-4000:]
        assert time.monotonic() < deadline, guardian.log.read_text()[-4000:]
        time.sleep(0.02)


@contextlib.contextmanager
def ended_at_last(processes: list[Process]) -> Iterator[None]:
    try:
        yield
    finally:
        for each in processes:
            if each.process.poll() is None:
                each.process.kill()
            each.process.wait()


# What strangers and liars say


def member(rng: random.Random, *, node: int | None = None, number: int | None = None) -> Member:
    return Member(
        member=MemberId(rng.getrandbits(62) if number is None else number),
        node=Node(rng.randrange(3) if node is None else node),
        local_rank=0,
        host=HOST,
        control_port=rng.randrange(1, 65536),
        data_port=1,
    )


def upstream(rng: random.Random) -> m.Message:
    """Of a type that followers send. A Join only under a name that is taken."""
    epoch, iteration = Epoch(rng.randrange(4)), Iteration(rng.randrange(9))
    roster = m.RosterIs(epoch=epoch, roster=any_roster(rng))
    return rng.choice(
        [
            m.Heartbeat(),
            m.Accepted(roster=RosterId(epoch, rng.randrange(3))),
            m.Aborted(
                epoch=epoch,
                store_port=0,
                holdings=Holdings(own=frozenset({iteration}), replicas=frozenset()),
                slot=Slot(rng.randrange(3)),
                has_state=rng.random() < 0.5,
                committed=iteration,
                installed=RosterId(epoch, 9),
                accepted=RosterId(epoch, 9),
            ),
            roster,
            m.Ready(epoch=epoch, seconds={"x": 1.0}, num_bytes=1, iterations_rerun=0),
            m.RegroupFailed(epoch=epoch, reason="x" * rng.randrange(100)),
            m.Staged(epoch=epoch, iteration=iteration),
            m.FirstStep(epoch=epoch, iteration=iteration, seconds=1.0),
            m.Finished(epoch=epoch),
            m.Failed(reason="a stranger's error", exit_code=1),
            m.TrainerLost(reason="a stranger's loss"),
            m.EndWanted(exit_code=1, reason="a stranger's wish"),
            m.DrainWanted(),
            m.EndNoted(),
        ]
    )


def any_roster(rng: random.Random) -> Roster:
    members = tuple(member(rng) for _ in range(rng.randrange(3)))
    return Roster(id=RosterId(Epoch(9), 0), members=members, slots=())


def malformed(rng: random.Random) -> bytes:
    """A frame that is none, or of a type that has no place on a control connection."""
    kind = rng.randrange(6)
    body = rng.randbytes(rng.randrange(1, 60))
    if kind == 0:
        return len(body).to_bytes(4, "little") + bytes([len(TYPES) + rng.randrange(99)]) + body
    if kind == 1:
        return (1 + len(body)).to_bytes(4, "little") + bytes([rng.randrange(len(TYPES))]) + body
    if kind == 2:  # Oversized.
        return rng.randrange(65 << 20, 1 << 32).to_bytes(4, "little") + body
    if kind == 3:
        return bytes(4)
    if kind == 4:
        return encode(rng.choice([m.TrainerUp(), m.Leave(), m.Resume(epoch=Epoch(1))]))
    # Nested deeper than any message.
    return (2001).to_bytes(4, "little") + bytes([rng.randrange(2, 29)]) + b"\x91" * 2000


def dial(port: int) -> socket.socket:
    sock = socket.create_connection((HOST, port), timeout=BOUND_S)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return sock


def receive(sock: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        piece = sock.recv(count - len(data))
        if not piece:
            raise ConnectionResetError
        data += piece
    return data


def authenticate(sock: socket.socket, purpose: Purpose, token: str = TOKEN) -> bytes:
    """Returns what was sent, for a replay."""
    dialer = Dialer(token.encode(), purpose)
    sock.sendall(dialer.opening)
    proof = dialer.receive(receive(sock, ANSWER_BYTES))
    sock.sendall(proof)
    return dialer.opening + proof


def wait_closed(sock: socket.socket) -> None:
    """By the other end."""
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_WR)
        while sock.recv(1 << 16):
            pass


class Attack:
    """Counts what it says; every connection is over when its method returns."""

    def __init__(self, rng: random.Random, control_port: int, data_port: int) -> None:
        self.rng = rng
        self.ports = {Purpose.CONTROL: control_port, Purpose.DATA: data_port}
        self.num_messages = 0
        self.recorded: dict[Purpose, bytes] = {}
        self.pool = [encode(upstream(rng)) for _ in range(1000)]

    def by_a_stranger(self) -> None:
        """Who does not know the token: noise, cut openings, wrong or replayed proofs."""
        rng = self.rng
        purpose = rng.choice(list(self.ports))
        opening = Dialer(b"another", purpose).opening
        text = rng.choice(
            [
                b"",
                rng.randbytes(rng.randrange(1, 200)),
                b"GET / HTTP/1.1\r\n\r\n",
                opening[: rng.randrange(1, len(opening))],
                opening + rng.randbytes(32),
                self.recorded.get(purpose, b"DEADPOOL"),
                b"\xff" * 100_000,
            ]
        )
        with dial(self.ports[purpose]) as sock, contextlib.suppress(OSError):
            sock.sendall(text)
            self.num_messages += 1
            wait_closed(sock)

    def by_a_liar(self) -> None:
        """Who knows it, at the control port: valid messages that have no place, then a bad one."""
        rng, me = self.rng, member(self.rng)
        frames = rng.choices(self.pool, k=BATCH)
        end = rng.randrange(5)
        if end == 0:
            frames.append(malformed(rng))
        elif end == 1:
            frames.append(encode(m.Join(member=me)))  # Its node is there, and alive.
        elif end == 2:
            frames.append(encode(m.Support(member=me, promised=Epoch(99), end=None)))
        elif end == 3:
            frames.append(encode(m.Join(member=member(rng, node=7))))  # Speaks for another.
        else:
            frames.append(frames[0][:-1])
        with dial(self.ports[Purpose.CONTROL]) as sock, contextlib.suppress(OSError):
            self.recorded[Purpose.CONTROL] = authenticate(sock, Purpose.CONTROL)
            hello = rng.random()
            if hello < 0.9:
                sock.sendall(encode(m.Hello(member=me)))
            elif hello < 0.95:
                sock.sendall(encode(m.Hello(member=me)) * 2)
            sock.sendall(b"".join(frames))
            self.num_messages += 1 + len(frames)
            wait_closed(sock)

    def at_the_data_port(self) -> None:
        """Replicas of epochs that never were, pulls of what is not there, then a bad request."""
        rng, asked = self.rng, []
        for _ in range(BATCH // 3):
            slot, epoch = Slot(rng.randrange(-3, 1 << 62)), Epoch(rng.choice([0, 7, 1 << 40]))
            iteration = Iteration(rng.randrange(99))
            offer = m.Offer(
                slot=slot, epoch=epoch, iteration=iteration, num_bytes=1 << 50, checksum=0
            )
            pull = m.Pull(slot=slot, epoch=epoch, iteration=iteration)
            asked.append(encode(rng.choice([offer, pull])))
        with dial(self.ports[Purpose.DATA]) as sock, contextlib.suppress(OSError):
            self.recorded[Purpose.DATA] = authenticate(sock, Purpose.DATA)
            sock.sendall(b"".join(asked))
            self.num_messages += len(asked)
            for _ in asked:
                length = int.from_bytes(receive(sock, 4), "little")
                answer = m.decode(receive(sock, length))
                assert isinstance(answer, m.Answer) and answer.refusal
            sock.sendall(malformed(rng))
            self.num_messages += 1
            wait_closed(sock)

    def run(self, num_messages: int) -> None:
        before = self.num_messages
        while self.num_messages - before < num_messages:
            for _ in range(3):
                self.by_a_stranger()
            self.by_a_liar()
            self.at_the_data_port()


# Tests


def test_guardian_at_whose_ports_anything_is_said_stays_as_it_was(tmp_path: Path) -> None:
    guardians = [Process(tmp_path, node) for node in range(3)]
    with ended_at_last(guardians):
        leads = guardians[0]
        wait_until(lambda: "leads 3 nodes" in leads.log.read_text(), leads)
        rng = random.Random(SEED)
        for each in guardians:
            wait_until(lambda each=each: each.state()["job"]["installed"] is not None, each)
        for guardian, share in ((leads, 0.8), (guardians[1], 0.2)):
            _, control_port, data_port = guardian.state()["address"]
            attack = Attack(rng, control_port, data_port)
            attack.run(NUM_MESSAGES // 20)  # Each kind is said once in the log, pools fill.
            before, lines = settled(guardian), guardian.num_log_lines
            attack.run(int(NUM_MESSAGES * share))
            after = settled(guardian)
            assert after["job"] == before["job"], f"seed {SEED}"
            for name, slack in [("descriptors", 2), ("tasks", 2), ("connections", 0)]:
                assert after[name] <= before[name] + slack, (name, before, after)
            assert after["rss_bytes"] - before["rss_bytes"] < 4 << 20, (before, after)
            assert guardian.num_log_lines <= lines + 10, guardian.log.read_text()[-3000:]
        contact = asyncio.run(join(leads.state()["address"][1]))
        assert contact["Welcome"] and contact["member"] == leads.state()["job"]["upstream"]
        leads.process.send_signal(signal.SIGINT)
        codes = [each.process.wait(BOUND_S) for each in guardians]
        assert codes == [130, 130, 130], [each.log.read_text()[-1000:] for each in guardians]
    violations, _ = check(load([tmp_path]))
    # Who attacked left no trace; everything else agrees.
    assert all("left no trace" in str(violation) for violation in violations), violations[:3]


def settled(guardian: Process) -> dict[str, Any]:
    """Once what was closed is closed at its end as well."""
    wait_until(lambda: guardian.state()["connections"] <= 4, guardian)
    time.sleep(0.1)
    return guardian.state()


async def join(port: int) -> dict[str, Any]:
    """A proper spare comes: whom it finds there, and that it is welcome."""
    events: asyncio.Queue[Event] = asyncio.Queue()
    peers = Peers(token=TOKEN.encode(), deliver=events.put_nowait)
    me = member(random.Random(1), node=9)
    peers.introduce(me)
    found = await peers.find_contact((HOST, port))
    peers.to_leader(found, m.Join(member=me))
    event = await asyncio.wait_for(events.get(), BOUND_S)
    await peers.close()
    assert isinstance(event, FromLeader)
    return {"member": found.member, "Welcome": isinstance(event.message, m.Welcome)}


@pytest.mark.parametrize("lie", ["unknown base", "another slot"])
def test_leader_that_says_what_cannot_be_is_hung_up_on(tmp_path: Path, lie: str) -> None:
    asyncio.run(lie_to_a_follower(tmp_path, lie))


async def lie_to_a_follower(folder: Path, lie: str) -> None:
    events: asyncio.Queue[Event] = asyncio.Queue()
    peers = Peers(token=TOKEN.encode(), deliver=events.put_nowait)
    port = await peers.listen(HOST)
    me = member(random.Random(2), node=0, number=5)
    me = Member(**{**{n: getattr(me, n) for n in Member.__slots__}, "control_port": port})
    peers.introduce(me)
    guardian = Process(folder, 1, contacts=((HOST, port),))
    with ended_at_last([guardian]):

        async def next_of(kind: type) -> FromFollower:
            while True:
                event = await asyncio.wait_for(events.get(), BOUND_S)
                if isinstance(event, FromFollower) and isinstance(event.message, kind):
                    return event
                if isinstance(event, kind):
                    return event  # type: ignore[return-value]

        joined = await next_of(m.Join)
        assert isinstance(joined.message, m.Join)
        other, who = joined.message.member, (joined.sender,)
        restart = Restart(restore=None, replaced=(), sources=(), store_slot=Slot(0), store_port=1)
        peers.to_followers(who, m.Welcome())
        slots = [me.member, other.member]
        # With whom it would be a majority: it goes on without its leader.
        spares = [member(random.Random(node), node=node) for node in (2, 3)]
        for epoch in (1, 2):
            peers.to_followers(who, m.Abort(epoch=Epoch(epoch), store_member=me.member))
            await next_of(m.Aborted)
            is_lie = epoch == 2
            propose = m.Propose(
                id=RosterId(Epoch(epoch), 0),
                leader=me.member,
                base=RosterId(Epoch(7), 7) if is_lie and lie == "unknown base" else None,
                added=(me, other, *spares),
                removed=(),
                slots=tuple((Slot(s), x) for s, x in enumerate(slots)),
                restart=restart,
            )
            peers.to_followers(who, propose)
            slots.reverse()
            if not is_lie:
                await next_of(m.Accepted)
        await next_of(FollowerGone)
        assert guardian.process.poll() is None
        wait_until(lambda: "it broke the protocol" in guardian.log.read_text(), guardian)
        guardian.process.send_signal(signal.SIGINT)
        assert await asyncio.to_thread(guardian.process.wait, BOUND_S) == 130
        await peers.close()
