"""Guardians' cores with a model of everything around them: network, trainers, memory.

A `World` offers moves; whoever drives it (`search`, `schedule`) chooses which comes next. The model
follows `peers.py`, `replication.py` and `integrations/megatron.py`:

- Connections are FIFO both ways. A reset loses any suffix of what was under way, then tells both
  ends. Who closes in silence is not told.
- A trainer enters an epoch when it sees the announcement; groups come up when the trainers of all
  slots stand in the epoch; the reduction of an iteration needs all of them in the loop; its step
  needs the commit of the one before, heard in this epoch, and makes a buffer invalid until the
  capture is sealed.
- A replica moves in two steps, bytes begin and bytes end, and is tried again while its epoch lasts.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Hashable, Iterable, Iterator
from typing import Any, NamedTuple

from deadpool.protocol import events as e
from deadpool.protocol import messages as m
from deadpool.protocol.guardian import Guardian
from deadpool.protocol.invariants import History, check_completeness, require
from deadpool.protocol.leader import Settings
from deadpool.protocol.placement import Grid
from deadpool.protocol.snapshots import NUM_BUFFERS, capture_buffer
from deadpool.protocol.types import (
    Bounds,
    Epoch,
    Holdings,
    Iteration,
    Member,
    MemberId,
    Node,
    Phase,
    Plan,
    RosterId,
    Slot,
    Standing,
)
from deadpool.simulation.freeze import copy_of, key_of, key_of_core

SHORT = Bounds(silence=2, seek=2, minority=9, start=9, recovery=6, leave=2)
"""Waits as short as they can be without a clock that runs ahead of the messages."""

ENDED = "ended"
"""In a connection's queue: it ends here."""

(STANDBY, WAITS_PLAN, PLANNED, READY, COMPUTES, REDUCED, CAPTURES, DONE, FALTERED, GONE) = (
    "standby waits-plan planned ready computes reduced captures done faltered gone".split()
)
IN_LOOP = frozenset({COMPUTES, REDUCED, CAPTURES, DONE})


class State(NamedTuple):
    """What a snapshot holds: an iteration, as completed in an epoch. Two of one iteration may
    differ in bits when they were made in different epochs."""

    iteration: Iteration
    made_in: int


class Connection(NamedTuple):
    dialler: MemberId
    acceptor: MemberId
    known: bool
    """The acceptor has had something on it."""
    up: tuple[Any, ...] | None
    """Under way to the acceptor; None when its end is closed."""
    down: tuple[Any, ...] | None


class PutInTurn(NamedTuple):
    put: e.Put
    holder: MemberId
    buffer: int | None
    """Of the holder; None until bytes are under way."""


class Transfer(NamedTuple):
    """Bytes under way that their owner has given up; they may still arrive whole."""

    holder: MemberId
    received: e.Received


class Late(NamedTuple):
    """A copy of a message, that is delivered once its receiver has entered a later epoch."""

    sender: MemberId
    receiver: MemberId
    is_up: bool
    message: Any


class Process:
    """A guardian's process and its trainer."""

    __slots__ = (
        "announced", "asks", "buffers", "committed", "completed", "core", "epoch", "is_hung",
        "is_stopped", "live", "out", "owner", "plan", "probes", "puts", "resumed", "seeks_contact",
        "slot", "stalled_in", "state",
    )  # fmt: skip

    def __init__(self, core: Guardian, num_buffers: int, owner: object) -> None:
        self.owner = owner
        """The world that may change it."""
        self.core = core
        self.out: int | None = None
        """Its connection to the leader."""
        self.seeks_contact = False
        self.probes: tuple[MemberId, ...] = ()
        self.asks: tuple[Any, ...] = ()
        self.is_stopped = False
        self.puts: tuple[PutInTurn, ...] = ()
        # The trainer
        self.state = STANDBY
        self.is_hung = False
        self.stalled_in = (-1, -1)
        """What its guardian had promised and answered when it last said that it stalls."""
        self.announced = Epoch(0)
        self.epoch = Epoch(0)
        self.plan: Plan | None = None
        self.slot = Slot(0)
        self.resumed = Epoch(0)
        self.committed: tuple[int, int] = (0, -1)
        """Epoch and iteration."""
        self.completed = Iteration(-1)
        self.live: State | None = None
        self.buffers: tuple[State | None, ...] = (None,) * num_buffers

    def copy(self, owner: object) -> Process:
        twin = object.__new__(Process)
        for name in Process.__slots__:
            setattr(twin, name, getattr(self, name))
        twin.core = copy_of(self.core)
        twin.owner = owner
        return twin

    def key(self) -> Hashable:
        return (
            key_of_core(self.core), self.out is None, self.seeks_contact, self.probes,
            self.is_stopped, key_of(self.puts), self.state, self.announced, self.epoch,
            key_of(self.plan), self.slot, self.resumed, self.committed, self.completed, self.live,
            self.buffers, self.is_hung, self.stalled_in,
        )  # fmt: skip

    def own(self) -> frozenset[Iteration]:
        return frozenset(state.iteration for state in self.buffers if state is not None)

    def invalidate(self, buffer: int) -> None:
        self.buffers = (*self.buffers[:buffer], None, *self.buffers[buffer + 1 :])

    def capture_buffer(self) -> int:
        return capture_buffer([state.iteration if state else None for state in self.buffers])

    def keep(self, state: State) -> None:
        buffer = self.capture_buffer()
        self.buffers = (*self.buffers[:buffer], state, *self.buffers[buffer + 1 :])


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Mistakes:
    """Seeded into the model: a search that does not find them proves nothing."""

    num_buffers: int = NUM_BUFFERS
    waits_for_commit: bool = True
    checks_epochs: bool = True
    """Of offers, of announcements to the trainer, of its messages."""
    core: type[Guardian] = Guardian


NO_MISTAKES = Mistakes()


class World:
    """last: the iteration after which trainers finish. chooses: which of several, where a driver
    does not say; the first without it. agenda: called with what has become possible."""

    def __init__(
        self,
        *,
        grid: Grid,
        num_spare_nodes: int,
        last: int,
        replicas: int = 1,
        bounds: Bounds = SHORT,
        mistakes: Mistakes = NO_MISTAKES,
        agenda: Callable[[str, int], None] | None = None,
    ) -> None:
        self.settings = Settings(
            grid=grid, num_spare_nodes=num_spare_nodes, replicas=replicas, bounds=bounds
        )
        self.last = last
        self.mistakes = mistakes
        self.agenda = agenda
        self.token = object()
        self.history = History()
        self.processes: dict[MemberId, Process] = {}
        self.connections: dict[int, Connection] = {}
        self.inbound: dict[tuple[MemberId, MemberId], int] = {}
        """(acceptor, dialler): the connection that answers go to."""
        self.lost: frozenset[MemberId] = frozenset()
        """Processes that were killed."""
        self.fenced_nodes: frozenset[Node] = frozenset()
        self.transfers: tuple[Transfer, ...] = ()
        self.losses_left = self.resets_left = self.suspicions_left = self.crashes_left = 0
        self.hangs_left = 0
        self.errors_left = self.regroup_failures_left = self.copies_left = self.late_left = 0
        self.late: tuple[Late, ...] = ()
        self.late_kinds: type | tuple[type, ...] = object
        """Of which messages a copy may come late."""
        self.rounds = 0
        self._next_connection = 0
        self._next_member = 0
        self._keys: dict[MemberId, Hashable] = {}
        self._accepted: dict[RosterId, frozenset[MemberId]] = {}
        """Who has accepted each roster: counted here, whatever leaders count."""
        self._promised: dict[MemberId, Epoch] = {}
        """The newest epoch that each member has entered, the lost ones too."""
        self.trace: Callable[[str], None] | None = None
        ranks = grid.ranks_per_node
        for node in range(grid.num_nodes + num_spare_nodes):
            for rank in range(ranks):
                self.start(Node(node), rank, forms_job=node == 0 and rank == 0)

    # Copies and keys

    def copy(self) -> World:
        twin = object.__new__(World)
        twin.__dict__.update(self.__dict__)
        twin.token = object()
        self.token = object()
        twin.history = self.history.copy()
        twin.processes = self.processes.copy()
        twin.connections = self.connections.copy()
        twin.inbound = self.inbound.copy()
        twin._keys = self._keys.copy()
        twin._accepted = self._accepted.copy()
        twin._promised = self._promised.copy()
        return twin

    def key(self) -> Hashable:
        for member, process in self.processes.items():
            if member not in self._keys:
                self._keys[member] = _intern(process.key())
        return (
            tuple((member, self._keys[member]) for member in self.processes),
            tuple(
                (c.dialler, c.acceptor, c.known, _keys_of(c.up), _keys_of(c.down))
                for _, c in sorted(self.connections.items())
            ),
            self.history.key(), frozenset(self._accepted.items()),
            frozenset(self._promised.items()), self.transfers,
            self.losses_left, self.resets_left, self.suspicions_left, self.crashes_left,
            self.hangs_left, self.errors_left, self.regroup_failures_left, self.copies_left,
            self.late_left, key_of(self.late),
        )  # fmt: skip

    def _mine(self, member: MemberId) -> Process:
        """The process, to be changed."""
        process = self.processes[member]
        if process.owner is not self.token:
            process = self.processes[member] = process.copy(self.token)
        self._keys.pop(member, None)
        return process

    def _tell_agenda(self, kind: str, number: int) -> None:
        if self.agenda is not None:
            self.agenda(kind, number)

    def _say(self, words: str, *values: object) -> None:
        if self.trace is not None:
            self.trace(words % values)

    # Processes

    def start(self, node: Node, local_rank: int, *, forms_job: bool = False) -> MemberId:
        number = MemberId(self._next_member)
        self._next_member += 1
        me = Member(
            member=number, node=node, local_rank=local_rank, host="", control_port=0, data_port=0
        )
        core = self.mistakes.core(self.settings, me)
        self.processes[number] = Process(core, self.mistakes.num_buffers, self.token)
        self.handle(number, e.Started(forms_job=forms_job))
        self._tell_agenda("tick", number)
        return number

    def crash(self, members: Iterable[MemberId], cut: Callable[[int], int] = lambda n: n) -> None:
        """Killed: of what they had sent, a prefix still arrives. cut: how much of n messages."""
        members = [x for x in members if x in self.processes]
        for member in members:
            self._end_connections(member, cut)
            del self.processes[member]
            self._keys.pop(member, None)
            self.lost |= {member}
        self._wake_all()

    def _end_connections(self, member: MemberId, cut: Callable[[int], int]) -> None:
        for number, c in list(self.connections.items()):
            if c.dialler == member:
                self._close(number, up=cut, down=None)
            elif c.acceptor == member:
                self._close(number, up=None, down=cut)

    def _close(
        self,
        number: int,
        *,
        up: Callable[[int], int] | None,
        down: Callable[[int], int] | None,
    ) -> None:
        """End a connection. None: that end is closed in silence; else it gets a prefix, then the
        news."""
        c = self.connections[number]
        new_up = new_down = None
        if up is not None and c.up is not None:
            new_up = _shorten(c.up, up)
            self._tell_agenda("up", number)
        if down is not None and c.down is not None:
            new_down = _shorten(c.down, down)
            self._tell_agenda("down", number)
        if not c.known and new_up == (ENDED,):
            new_up = None  # The acceptor never hears of it.
        self._put_back(number, c._replace(up=new_up, down=new_down))

    def _put_back(self, number: int, c: Connection) -> None:
        if c.up is None:
            if self.inbound.get((c.acceptor, c.dialler)) == number:
                del self.inbound[c.acceptor, c.dialler]
            if c.down is None:
                del self.connections[number]
                return
        self.connections[number] = c

    def alive(self) -> list[MemberId]:
        return list(self.processes)

    def is_over(self) -> bool:
        return not self.processes

    # Events into cores, actions out

    def handle(self, member: MemberId, event: e.Event) -> list[e.Action]:
        """Feed a core and carry out what it says; answers to offers and asks come back."""
        core = self._mine(member).core
        installed, accepted = core.installed, core.accepted[-1:]
        answers: list[e.Action] = []
        actions = core.handle(event)
        self._promised[member] = core.promised
        for action in actions:
            do = _ACTIONS.get(type(action))
            if do is None:
                answers.append(action)
            else:
                do(self, member, action)
        if core.installed is not installed or core.accepted[-1:] != accepted:
            newest = core._rosters[-1]
            self.history.accepted(newest)
            by = self._accepted.get(newest.id, frozenset())
            self._accepted[newest.id] = by | {member}
        return answers

    def _notice_proposal(self, member: MemberId, message: Any) -> None:
        leader = self.processes[member].core.leader
        assert leader is not None and leader._roster is not None
        if leader._roster.id == message.id:
            self.history.proposed(member, leader._roster)

    def _to_followers(self, member: MemberId, action: e.ToFollowers) -> None:
        for follower in action.members:
            number = self.inbound.get((member, follower))
            if number is not None:
                c = self.connections[number]
                if c.down is not None and c.down[-1:] != (ENDED,):
                    self.connections[number] = c._replace(down=(*c.down, action.message))
                    self._tell_agenda("down", number)
        message: Any = action.message
        kind = type(message)
        if kind is m.Propose:
            self._notice_proposal(member, message)
        elif kind is m.Committed:
            self._notice_commit(message)
        elif kind is m.Install:
            self.history.installed(message.roster, self._accepted.get(message.roster, frozenset()))

    def _notice_commit(self, message: Any) -> None:
        if message.iteration > self.history.commits.get(message.epoch, -1):
            self.history.committed(message.epoch, message.iteration)

    def _to_leader(self, member: MemberId, action: e.ToLeader) -> None:
        process = self.processes[member]
        leader = action.leader.member
        if process.out is not None:
            c = self.connections[process.out]
            if c.acceptor == leader:
                if c.up is not None and c.up[-1:] != (ENDED,):
                    self.connections[process.out] = c._replace(up=(*c.up, action.message))
                    self._tell_agenda("up", process.out)
                return
            self._close(process.out, up=lambda n: n, down=None)
        number = process.out = self._next_connection
        self._next_connection += 1
        if leader in self.processes:
            self.connections[number] = Connection(member, leader, False, (action.message,), ())
            self._tell_agenda("up", number)
        else:
            self.connections[number] = Connection(member, leader, False, None, (ENDED,))
            self._tell_agenda("down", number)

    def _hang_up(self, member: MemberId, action: e.HangUp) -> None:
        for follower in action.members:
            number = self.inbound.get((member, follower))
            if number is not None:
                self._close(number, up=None, down=lambda n: n)

    def _find_contact(self, member: MemberId, action: e.FindContact) -> None:
        self.processes[member].seeks_contact = True
        self._tell_agenda("contact", member)

    def _probe(self, member: MemberId, action: e.Probe) -> None:
        target = action.member.member
        process = self.processes[member]
        if target not in self.processes and target not in process.probes:
            process.probes += (target,)
            self._tell_agenda("probe", member)

    def _abort_trainer(self, member: MemberId, action: e.AbortTrainer) -> None:
        process = self.processes[member]
        process.announced = action.epoch
        self._cancel(member, e.CancelTransfers())
        self._tell_agenda("trainer", member)

    def _cancel(self, member: MemberId, action: e.CancelTransfers) -> None:
        process = self.processes[member]
        if self.agenda is not None:
            for each in process.puts:
                if each.buffer is not None:
                    self.transfers += (self._transfer(process, each),)
                    self._tell_agenda("transfer", len(self.transfers))
        process.puts = ()

    def _adopt_plan(self, member: MemberId, action: e.AdoptPlan) -> None:
        process = self.processes[member]
        restore = action.plan.restart.restore
        self.history.adopted(action.plan)
        if restore is not None:
            process.buffers = tuple(
                None if s is not None and s.iteration > restore else s for s in process.buffers
            )
        require(process.core.slot == action.slot, "2: a plan for another slot")
        process.plan, process.slot = action.plan, action.slot
        self._wake_all()

    def _resume_trainer(self, member: MemberId, action: e.ResumeTrainer) -> None:
        self.processes[member].resumed = action.epoch
        self._tell_agenda("trainer", member)

    def _tell_committed(self, member: MemberId, action: e.TellCommitted) -> None:
        process = self.processes[member]
        process.committed = (action.epoch, action.iteration)
        self._notice_commit(action)
        self._tell_agenda("trainer", member)

    def _put(self, member: MemberId, action: e.Put) -> None:
        process = self.processes[member]
        process.puts += tuple(PutInTurn(action, x.member, None) for x in action.holders)
        self._tell_agenda("put", member)

    def _keep_snapshots(self, member: MemberId, action: e.KeepSnapshots) -> None:
        """What is written is there."""
        p = self.processes[member]
        for slot in action.slots:
            is_there = (
                action.iteration in p.own()
                if slot == p.core.slot
                else (slot, action.iteration) in p.core.shelf.holdings()
            )
            require(is_there, f"3: {member} is to keep {action.iteration} of slot {slot}")

    def _stop_trainer(self, member: MemberId, action: e.StopTrainer) -> None:
        process = self.processes[member]
        process.state, process.puts = GONE, ()
        self.history.ended(action.end.epoch, action.end.exit_code)

    def _exit(self, member: MemberId, action: e.Exit) -> None:
        self._say(f"{member} exits with {action.exit_code} {action.reason}")
        self.history.exited(member, action.exit_code)
        self._end_connections(member, lambda n: n)
        del self.processes[member]
        self._keys.pop(member, None)
        self._wake_all()

    def _enter_phase(self, member: MemberId, action: e.EnterPhase) -> None:
        self._say(f"{member} leads: epoch {action.epoch} {action.phase.value}")
        if action.phase is Phase.REGROUPING:
            promised_by = {x for x, epoch in self._promised.items() if epoch >= action.epoch}
            self.history.planned(action.epoch, promised_by)
        if action.phase is Phase.TRAINING:
            accepted = self._accepted.get(RosterId(action.epoch, 0), frozenset())
            gone_on = {x for x, epoch in self._promised.items() if epoch > action.epoch}
            self.history.resumed(action.epoch, accepted, gone_on)
        leader = self.processes[member].core.leader
        if leader is not None and leader.end is not None and leader.end.exit_code == 0:
            self._check_complete(leader.end.epoch)

    def _check_complete(self, ended: Epoch) -> None:
        """Unless this leader is cut off, and training goes on elsewhere."""
        trained = max(self.history.restores)
        for p in self.processes.values():
            require(
                ended < trained
                or p.epoch != trained
                or p.state not in IN_LOOP
                or p.completed == self.last,
                f"5: the job completes and slot {p.slot} has done {p.completed} alone",
            )

    def _nothing(self, member: MemberId, action: e.Action) -> None:
        pass

    # Moves of the network

    def deliver_up(self, number: int) -> None:
        """The acceptor takes the next thing on a connection."""
        c = self.connections[number]
        assert c.up
        message, rest = c.up[0], c.up[1:]
        self._say("%s takes from follower %s: %s", c.acceptor, c.dialler, message)
        if message is ENDED:
            self._put_back(number, c._replace(up=None))
            self.handle(c.acceptor, e.FollowerGone(sender=c.dialler, reason="reset"))
            return
        self.connections[number] = c._replace(known=True, up=rest)
        if not c.known:
            self._make_known(number, c)
        if c.acceptor in self.processes:
            self.handle(c.acceptor, e.FromFollower(sender=c.dialler, message=message))

    def _make_known(self, number: int, c: Connection) -> None:
        """What is left of earlier connections between the two ends first."""
        for earlier, old in list(self.connections.items()):
            if earlier < number and (old.dialler, old.acceptor) == (c.dialler, c.acceptor):
                if old.up is None or earlier not in self.connections:
                    continue
                self._put_back(earlier, old._replace(up=None))
                if old.known and c.acceptor in self.processes:
                    self.handle(c.acceptor, e.FollowerGone(sender=c.dialler, reason="again"))
        if number in self.connections and self.connections[number].up is not None:
            self.inbound[c.acceptor, c.dialler] = number

    def deliver_down(self, number: int) -> None:
        c = self.connections[number]
        assert c.down
        message, rest = c.down[0], c.down[1:]
        self._say("%s takes from leader %s: %s", c.dialler, c.acceptor, message)
        if message is ENDED:
            self._put_back(number, c._replace(down=None))
            self._mine(c.dialler).out = None
            self.handle(c.dialler, e.LeaderGone(sender=c.acceptor, reason="reset"))
            return
        self.connections[number] = c._replace(down=rest)
        self.handle(c.dialler, e.FromLeader(sender=c.acceptor, message=message))

    def repeat(self, number: int, *, up: bool) -> None:
        """The next message is taken, and will be taken again."""
        c = self.connections[number]
        queue = c.up if up else c.down
        assert queue and queue[0] is not ENDED
        doubled = (queue[0], *queue)
        self.connections[number] = c._replace(up=doubled) if up else c._replace(down=doubled)
        self._tell_agenda("up" if up else "down", number)

    def keep_copy(self, number: int, *, up: bool) -> None:
        """Of the next message, which has an epoch."""
        c = self.connections[number]
        queue = c.up if up else c.down
        assert queue
        ends = (c.dialler, c.acceptor) if up else (c.acceptor, c.dialler)
        self.late += (Late(*ends, up, queue[0]),)

    def is_late(self, late: Late) -> bool:
        process = self.processes.get(late.receiver)
        if process is None:
            return False
        leader = process.core.leader
        if not late.is_up:
            return epoch_of(late.message) < process.core.promised and bool(process.core.upstream)
        return leader is not None and epoch_of(late.message) < leader.epoch

    def deliver_late(self, index: int) -> None:
        late = self.late[index]
        self.late = self.late[:index] + self.late[index + 1 :]
        self._say("%s takes, too late: %s", late.receiver, late.message)
        if late.is_up:
            self.handle(late.receiver, e.FromFollower(sender=late.sender, message=late.message))
        else:
            upstream = self.processes[late.receiver].core.upstream
            assert upstream is not None
            self.handle(late.receiver, e.FromLeader(sender=upstream.member, message=late.message))

    def reset(self, number: int, up: Callable[[int], int], down: Callable[[int], int]) -> None:
        self._say(f"connection {self.connections[number][:2]} is reset")
        self._close(number, up=up, down=down)

    def answer_contact(self, member: MemberId, among: Iterable[MemberId]) -> bool:
        """Some member that follows or seeks was reached."""
        found = next((x for x in among if self._is_contact(x, member)), None)
        if found is None:
            return False
        self._mine(member).seeks_contact = False
        self._say(f"{member} is in contact with {found}")
        self.handle(member, e.Contact(member=self.processes[found].core.me))
        return True

    def _is_contact(self, member: MemberId, by: MemberId) -> bool:
        process = self.processes.get(member)
        if process is None or member == by or process.is_stopped:
            return False
        core = process.core
        return core.leader is not None or core.standing is not Standing.JOINING

    def answer_probe(self, member: MemberId) -> None:
        process = self._mine(member)
        target, *rest = process.probes
        process.probes = tuple(rest)
        self._say(f"{member} learns that {target} is dead")
        self.handle(member, e.Dead(member=target))

    def tick(self, member: MemberId) -> None:
        self._say("%s ticks", member)
        self.handle(member, e.Tick())

    # Moves of a trainer

    def _wake_all(self) -> None:
        if self.agenda is not None:
            for member in self.processes:
                self.agenda("trainer", member)

    def trainer_moves(self, member: MemberId) -> Iterator[str]:
        p = self.processes[member]
        state = p.state
        if p.is_hung:
            if p.stalled_in != (p.core.promised, p.core._has_answered):
                yield "stalls"
            return
        if state is CAPTURES:
            yield "seals"
        if state is GONE:
            return
        if p.announced > p.epoch:
            yield "enters"
        elif state is WAITS_PLAN:
            if p.plan is not None and p.plan.epoch == p.epoch and self._has_source(p):
                yield "takes plan"
        elif state is PLANNED:
            if self._peers_are(p, frozenset({PLANNED, READY})):
                yield "restores"
                if self.regroup_failures_left and p.plan and p.plan.restart.restore is not None:
                    yield "fails to regroup"
        elif state is READY:
            if p.resumed == p.epoch:
                yield "resumes"
        elif state is COMPUTES:
            if self._peers_are(p, IN_LOOP, p.completed):
                yield "reduces"
            if self.regroup_failures_left and p.puts and p.resumed == p.epoch:
                yield "finds damage"
        elif state is REDUCED and (
            p.committed >= (p.epoch, p.completed) or not self.mistakes.waits_for_commit
        ):
            yield "steps"
        if self.errors_left and state in (COMPUTES, REDUCED):
            yield "falters"
        if self.hangs_left and state in IN_LOOP:
            yield "hangs"

    def _peers_are(self, p: Process, states: frozenset[str], completed: int = -2) -> bool:
        assert p.plan is not None
        for member in p.plan.slots:
            peer = self.processes.get(member.member)
            if peer is None or peer.epoch != p.epoch or peer.state not in states:
                return False
            if peer.completed < completed:
                return False
        return True

    def _has_source(self, p: Process) -> bool:
        """Nothing to fetch, or somebody to fetch it from."""
        assert p.plan is not None
        restore = p.plan.restart.restore
        if restore is None or restore in p.own():
            return True
        source = dict(p.plan.restart.sources).get(p.slot)
        require(source is not None, f"3: slot {p.slot} has no {restore} and no source")
        return source in self.processes

    def trainer(self, member: MemberId, move: str) -> None:
        p = self._mine(member)
        self._say("trainer %s %s (epoch %s, completed %s)", member, move, p.epoch, p.completed)
        _TRAINER[move](self, member, p)
        if move in _WAKES_PEERS:
            self._wake_all()
        else:
            self._tell_agenda("trainer", member)

    def _enters(self, member: MemberId, p: Process) -> None:
        p.epoch, p.state = p.announced, WAITS_PLAN
        event = e.TrainerAborted(epoch=p.epoch, store_port=p.epoch, own=p.own())
        self.handle(member, event)

    def _takes_plan(self, member: MemberId, p: Process) -> None:
        """The guardian brings what is missing; then the trainer builds groups."""
        assert p.plan is not None
        restore, port = p.plan.restart.restore, p.plan.restart.store_port
        require(port == p.epoch, f"2: epoch {p.epoch} is to meet at the store of epoch {port}")
        p.state = PLANNED
        if restore is None or restore in p.own():
            return
        source = dict(p.plan.restart.sources)[p.slot]
        asked = e.Asked(slot=p.slot, epoch=p.plan.epoch, iteration=restore)
        (answer,) = self.handle(source, asked)
        assert isinstance(answer, e.AnswerPull)
        if answer.buffer is None:
            p.state = WAITS_PLAN
            self._say(f"{member} cannot fetch: {answer.refusal}")
            require(
                self.processes[source].core.promised > p.plan.epoch,
                f"3: slot {p.slot} is sent to a member without its replica of {restore}",
            )
            p.plan = None
            self.handle(member, e.FetchFailed(epoch=p.epoch, reason=answer.refusal))
            return
        kept = self.processes[source].core.shelf[p.slot].kept(answer.buffer)
        assert kept is not None
        p.keep(State(kept.iteration, kept.checksum))

    def _restores(self, member: MemberId, p: Process) -> None:
        assert p.plan is not None
        restore = p.plan.restart.restore
        if restore is None:
            p.live = State(Iteration(0), 0)
            p.keep(p.live)
            p.completed = Iteration(0)
            p.state = READY
            self.handle(member, e.Captured(epoch=p.epoch, iteration=Iteration(0)))
        else:
            p.live = next(s for s in p.buffers if s is not None and s.iteration == restore)
            p.completed = restore
            p.state = READY
        self.history.was_loaded(p.epoch, member, *p.live)
        self.history.highest = max(self.history.highest, p.completed)
        ready = m.Ready(epoch=p.epoch, seconds={}, num_bytes=0, iterations_rerun=0)
        self.handle(member, e.TrainerSaid(message=ready))

    def _fails_to_regroup(self, member: MemberId, p: Process) -> None:
        self.regroup_failures_left -= 1
        p.state, p.plan = WAITS_PLAN, None
        failed = m.RegroupFailed(epoch=p.epoch, reason="no route")
        self.handle(member, e.TrainerSaid(message=failed))

    def _finds_damage(self, member: MemberId, p: Process) -> None:
        """In its own snapshot, while that goes to the holder. The live state still is what the
        snapshot was, so that it goes on counting as held."""
        self.regroup_failures_left -= 1
        p.puts = ()
        self.handle(member, e.FetchFailed(epoch=p.epoch, reason="a damaged snapshot"))

    def _falters(self, member: MemberId, p: Process) -> None:
        self.errors_left -= 1
        p.state = FALTERED
        iteration = Iteration(p.completed + 1)
        faltered = m.Faltered(epoch=p.epoch, iteration=iteration, kind="error", reason="an error")
        self.handle(member, e.TrainerSaid(message=faltered))

    def _hangs(self, member: MemberId, p: Process) -> None:
        self.hangs_left -= 1
        p.is_hung = True

    def _stalls(self, member: MemberId, p: Process) -> None:
        """Its guardian has waited long enough."""
        p.stalled_in = (p.core.promised, p.core._has_answered)
        self.trainer_stalls(member)

    def hang(self, member: MemberId) -> None:
        """Where it is in the training loop; a leader's bound covers the rest."""
        p = self._mine(member)
        p.is_hung = p.state in IN_LOOP

    def trainer_stalls(self, member: MemberId) -> None:
        iteration = Iteration(self.processes[member].completed + 1)
        self.handle(member, e.TrainerStalled(iteration=iteration, reason="no progress"))

    def _kill_trainer(self, member: MemberId, action: e.KillTrainer) -> None:
        self.trainer_dies(member)

    def _resumes(self, member: MemberId, p: Process) -> None:
        if p.completed < self.last:
            p.state = COMPUTES
        else:
            p.state = DONE
            self.handle(member, e.TrainerSaid(message=m.Finished(epoch=p.epoch)))

    def _reduces(self, member: MemberId, p: Process) -> None:
        p.state = REDUCED

    def _steps(self, member: MemberId, p: Process) -> None:
        p.completed = Iteration(p.completed + 1)
        p.live = State(p.completed, p.epoch)
        p.invalidate(p.capture_buffer())
        p.state = CAPTURES
        self.history.stepped(p.epoch, p.completed)

    def _seals(self, member: MemberId, p: Process) -> None:
        assert p.live is not None and p.plan is not None
        p.keep(p.live)
        p.state = COMPUTES if p.completed < self.last else DONE
        restore = p.plan.restart.restore
        self.handle(member, e.Captured(epoch=p.epoch, iteration=p.completed))
        if restore is not None and p.completed == restore + 1:
            first = m.FirstStep(epoch=p.epoch, iteration=p.completed, seconds=0.0)
            self.handle(member, e.TrainerSaid(message=first))
        if p.state is DONE:
            self.handle(member, e.TrainerSaid(message=m.Finished(epoch=p.epoch)))

    def trainer_dies(self, member: MemberId, *, can_respawn: bool = True) -> None:
        p = self._mine(member)
        p.state = GONE
        self._say(f"trainer {member} is killed")
        event = e.TrainerDied(
            signal="SIGKILL", exit_code=137, can_respawn=can_respawn, reason="kill"
        )
        self.handle(member, event)
        self._wake_all()

    def _spawn_trainer(self, member: MemberId, action: e.SpawnTrainer) -> None:
        """It knows nothing; the guardian's memory, and what it holds, stays."""
        p = self.processes[member]
        p.state, p.plan, p.slot = STANDBY, None, Slot(0)
        p.is_hung, p.stalled_in = False, (-1, -1)
        p.announced = p.epoch = p.resumed = Epoch(0)
        p.committed, p.completed, p.live = (0, -1), Iteration(-1), None

    # Moves of replicas

    def can_put(self, member: MemberId) -> bool:
        p = self.processes[member]
        if not p.puts:
            return False
        head = p.puts[0]
        holder = self.processes.get(head.holder)
        if holder is None:
            return False
        return (
            head.buffer is not None
            or holder.core.promised == head.put.epoch
            or not self.mistakes.checks_epochs
        )

    def _transfer(self, p: Process, each: PutInTurn) -> Transfer:
        put = each.put
        made = self._made_in(p, put.iteration)
        assert each.buffer is not None
        received = e.Received(
            slot=put.slot, epoch=put.epoch, iteration=put.iteration, buffer=each.buffer,
            num_bytes=1, checksum=made, announced=made,
        )  # fmt: skip
        return Transfer(each.holder, received)

    def _made_in(self, p: Process, iteration: Iteration) -> int:
        found = next((s for s in p.buffers if s is not None and s.iteration == iteration), None)
        return -1 if found is None else found.made_in

    def put(self, member: MemberId) -> None:
        """The first put in turn begins, or ends."""
        p = self._mine(member)
        (put, holder, buffer), *rest = p.puts
        made = self._made_in(p, put.iteration)
        if buffer is None:
            offered = e.Offered(
                slot=put.slot, epoch=put.epoch, iteration=put.iteration, num_bytes=1, checksum=made
            )
            (answer,) = self.handle(holder, offered)
            done = "begins"
        else:
            transfer = self._transfer(p, p.puts[0])
            (answer,) = self.handle(holder, transfer.received)
            done = "ends"
        assert isinstance(answer, e.AnswerOffer)
        words = "%s puts %s at %s: %s %s %s"
        self._say(words, member, put.iteration, holder, done, answer.refusal, answer.buffer)
        if answer.buffer is not None or answer.refusal:
            p.puts = (PutInTurn(put, holder, answer.buffer), *rest)
        else:
            p.puts = tuple(rest)
            if not any(each.put is put for each in rest):
                self.handle(member, e.PutDone(epoch=put.epoch, iteration=put.iteration))
        self._tell_agenda("put", member)

    def end_transfer(self, index: int, *, arrives: bool) -> None:
        transfer = self.transfers[index]
        self.transfers = self.transfers[:index] + self.transfers[index + 1 :]
        if arrives and transfer.holder in self.processes:
            self.handle(transfer.holder, transfer.received)

    # Invariants

    def leaders(self) -> Iterator[tuple[MemberId, Any]]:
        for member, process in self.processes.items():
            if process.core.leader is not None:
                yield member, process.core.leader

    def check(self) -> None:
        """Those of the present; those of the past are checked as things happen."""
        epoch = max(self.history.commits, default=None)
        if epoch is None or epoch != max(self.history.restores, default=None):
            return
        plan = self.history.plans[epoch]
        members = [x.member for x in plan.slots]
        if any(x not in self.processes or self.processes[x].state is GONE for x in members):
            return  # A loss that the leader will hear of.
        if any(self.processes[x].core.promised != epoch for x in members):
            return
        memories = {x: self._holdings(x) for x in members}
        check_completeness(plan, self.history.commits[epoch], self.history.highest, memories)

    def _holdings(self, member: MemberId) -> Holdings:
        p = self.processes[member]
        return Holdings(own=p.own(), replicas=p.core.shelf.holdings())


def epoch_of(message: Any) -> int:
    """-1 where it has none."""
    named = getattr(message, "roster", None) or getattr(message, "id", None)
    if isinstance(message, m.Ended):
        return message.end.epoch
    if isinstance(named, RosterId):
        return named.epoch
    return int(getattr(message, "epoch", -1))


def _shorten(queue: tuple[Any, ...], cut: Callable[[int], int]) -> tuple[Any, ...]:
    if queue[-1:] == (ENDED,):
        return queue
    return (*queue[: cut(len(queue))], ENDED)


_interned: dict[Hashable, int] = {}


def _intern(value: Hashable) -> int:
    return _interned.setdefault(value, len(_interned))


_message_keys: dict[int, tuple[Any, int]] = {}


def _keys_of(queue: tuple[Any, ...] | None) -> Hashable:
    return None if queue is None else tuple(map(_key_of_message, queue))


def _key_of_message(message: Any) -> int:
    known = _message_keys.get(id(message))
    if known is None or known[0] is not message:
        known = _message_keys[id(message)] = (message, _intern(key_of(message)))
    return known[1]


_ACTIONS: dict[type, Callable[[World, MemberId, Any], None]] = {
    e.ToFollowers: World._to_followers,
    e.ToLeader: World._to_leader,
    e.HangUp: World._hang_up,
    e.FindContact: World._find_contact,
    e.Probe: World._probe,
    e.SpawnTrainer: World._spawn_trainer,
    e.KillTrainer: World._kill_trainer,
    e.DrainTrainer: World._nothing,
    e.AbortTrainer: World._abort_trainer,
    e.CancelTransfers: World._cancel,
    e.AdoptPlan: World._adopt_plan,
    e.ResumeTrainer: World._resume_trainer,
    e.TellCommitted: World._tell_committed,
    e.Put: World._put,
    e.KeepSnapshots: World._keep_snapshots,
    e.Lacks: World._nothing,
    e.StopTrainer: World._stop_trainer,
    e.Exit: World._exit,
    e.EnterPhase: World._enter_phase,
    e.Observe: World._nothing,
    e.SuspectCorruption: World._nothing,
    e.RosterInstalled: World._nothing,
}

_TRAINER: dict[str, Callable[[World, MemberId, Process], None]] = {
    "enters": World._enters,
    "takes plan": World._takes_plan,
    "restores": World._restores,
    "fails to regroup": World._fails_to_regroup,
    "finds damage": World._finds_damage,
    "falters": World._falters,
    "hangs": World._hangs,
    "stalls": World._stalls,
    "resumes": World._resumes,
    "reduces": World._reduces,
    "steps": World._steps,
    "seals": World._seals,
}


_WAKES_PEERS = frozenset({"takes plan", "resumes", "steps"})
"""Moves that let others move."""


def small_grid(num_nodes: int, ranks_per_node: int = 1) -> Grid:
    return Grid(
        world_size=num_nodes * ranks_per_node,
        ranks_per_node=ranks_per_node,
        tensor=1,
        context=1,
        pipeline=1,
        pipeline_before_data=False,
    )


def keep_all(count: int) -> int:
    return count


def keep_none(count: int) -> int:
    return 0


def keep_some(chooser: random.Random) -> Callable[[int], int]:
    return lambda count: chooser.randint(0, count)
