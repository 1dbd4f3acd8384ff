"""Do the traces of a job's guardians agree with the protocol's core, and with each other?

Pure: traces in, violations out. Each trace is replayed through a fresh core; what spans guardians
is then checked without regard to clocks, so that traces of many hosts can be compared.

Sound for what a real job leaves:

- A killed guardian's trace ends early, perhaps in a torn line. Lines are written before messages
  are sent, so that nothing is missing which others took. Only where a host was lost with lines that
  had not reached the disk (`tails_lost`) may what others took from a guardian without an Exit go
  beyond its last line, and then whatever comes after the last message of a connection is believed.
- On one connection the messages taken are the messages sent, in order and without a gap; only at
  its two ends some may be lost (before the follower was admitted, when it broke). So what was taken
  is a sequence of such runs of what was sent. Where a connection began is taken from the taker's
  trace.
- All traces of the job are there. A guardian writes the first line before it says anything.

Messages of a guardian to itself never leave its core and are in no trace: its own accept of a
roster is taken for granted.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

from deadpool.protocol import events as e
from deadpool.protocol import messages as m
from deadpool.protocol.guardian import Guardian
from deadpool.protocol.invariants import OUTSIDE, Violated, check_plan
from deadpool.protocol.leader import Settings
from deadpool.protocol.types import (
    Epoch,
    Iteration,
    Member,
    MemberId,
    Plan,
    ProtocolError,
    Restart,
    Roster,
    RosterId,
    Slot,
)
from deadpool.trace import Step, read_trace

_K = TypeVar("_K")
_V = TypeVar("_V")

_MAX_SHOWN = 600
"""Characters of an action in a violation."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """What one guardian wrote."""

    name: str
    settings: Settings
    me: Member
    steps: tuple[Step, ...]

    @property
    def is_whole(self) -> bool:
        """The guardian's part was over."""
        return bool(self.steps) and any(isinstance(x, e.Exit) for x in self.steps[-1].actions)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Violation:
    where: str
    """File, and line where there is one."""
    what: str

    def __str__(self) -> str:
        return f"{self.where}: {self.what}"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """What was checked."""

    num_guardians: int
    num_cut: int
    """Killed, or still running."""
    num_events: int
    num_messages: int
    """Taken from peers."""
    num_epochs: int
    """That were resumed."""
    num_commits: int
    exit_codes: tuple[int, ...]
    """Different ones, of guardians that ended by themselves."""

    def __str__(self) -> str:
        codes = ", ".join(map(str, self.exit_codes)) or "none"
        return (
            f"{self.num_guardians} guardians ({self.num_cut} cut off), {self.num_events} events, "
            f"{self.num_messages} messages between them, {self.num_epochs} epochs trained, "
            f"{self.num_commits} commits, exit codes {codes}: every core repeats, all agree"
        )


def load(paths: Iterable[str | Path]) -> list[Trace]:
    """Files, or folders with protocol-*.jsonl. Raises NoTrace and OSError."""
    files: list[Path] = []
    for path in map(Path, paths):
        files += sorted(path.glob("protocol-*.jsonl")) if path.is_dir() else [path]
    traces = []
    for file in files:
        settings, me, steps = read_trace(file)
        traces.append(Trace(name=file.name, settings=settings, me=me, steps=tuple(steps)))
    return traces


def check(
    traces: Sequence[Trace], *, tails_lost: bool = False, most_rerun: int = 1
) -> tuple[list[Violation], Summary]:
    """Everything; what spans guardians only where every core repeats. tails_lost: traces without an
    Exit may lack their last lines. most_rerun: completed iterations that one loss may cost."""
    job = _Job(traces, tails_lost, most_rerun)
    for trace in traces:
        _Replay(job, trace).run()
    if not job.violations:
        job.check_all()
    return job.violations, job.summary()


class _Job:
    """Facts of all traces, gathered while they are replayed."""

    def __init__(self, traces: Sequence[Trace], tails_lost: bool, most_rerun: int) -> None:
        self._tails_lost = tails_lost
        self.most_rerun = most_rerun
        self.traces = {trace.me.member: trace for trace in traces}
        self.violations: list[Violation] = []
        self.num_messages = 0
        self.sent: dict[_Way, list[m.Upstream | m.Downstream]] = defaultdict(list)
        self.taken: dict[_Way, list[_Taken]] = defaultdict(list)
        self.rosters: dict[RosterId, tuple[Roster, str]] = {}
        self.plans: dict[Epoch, tuple[Plan, str]] = {}
        self.restarts: dict[Epoch, tuple[tuple[MemberId, Restart], str]] = {}
        self.holders: dict[tuple[Epoch, Slot], tuple[MemberId, str]] = {}
        self.proposers: dict[Epoch, tuple[MemberId, str]] = {}
        self.commits: dict[Epoch, list[tuple[Iteration, str]]] = defaultdict(list)
        """As the leader said them."""
        self.damaged: set[Iteration] = set()
        """Of which some copy was: an epoch may go back behind them."""
        self.reruns: list[tuple[int, str]] = []
        """How many iterations a trainer ran again, where more than one."""
        self.captured: dict[Epoch, Iteration] = {}
        """The newest that any slot has completed."""
        self.in_force: dict[RosterId, tuple[frozenset[MemberId], str]] = {}
        """With who had accepted it, by its leader's trace."""
        self.exits: list[tuple[int, str]] = []
        """Of guardians that ended by themselves: code, where."""
        self.told_exits: list[tuple[int, str]] = []
        """Of those that were told the job's end and not fenced."""

    def summary(self) -> Summary:
        traces = self.traces.values()
        return Summary(
            num_guardians=len(self.traces),
            num_cut=sum(not trace.is_whole for trace in traces),
            num_events=sum(len(trace.steps) for trace in traces),
            num_messages=self.num_messages,
            num_epochs=sum(roster.version == 0 for roster in self.in_force),
            num_commits=sum(map(len, self.commits.values())),
            exit_codes=tuple(sorted({code for code, _ in self.exits})),
        )

    def broken(self, where: str, what: str) -> None:
        self.violations.append(Violation(where=where, what=what))

    def same(
        self, known: dict[_K, tuple[_V, str]], key: _K, value: _V, where: str, kind: str
    ) -> None:
        """The first to name it decides; anybody else must say the same."""
        first, there = known.setdefault(key, (value, where))
        if first != value:
            text = f"another {kind} of {_name(key)} than at {there}: "
            self.broken(where, text + f"{_show(value)}, there {_show(first)}")

    # Between guardians

    def check_all(self) -> None:
        for way, taken in self.taken.items():
            self._check_way(way, taken)
        for plan, where in self.plans.values():
            try:
                check_plan(plan)
            except Violated as error:
                self.broken(where, str(error))
        self._check_quorums()
        self._check_iterations()
        self._check_exits()

    def _check_way(self, way: _Way, taken: Sequence[_Taken]) -> None:
        """Places where the next message may have been sent; see the module's docstring."""
        sender = self.traces.get(way.sender)
        if sender is None:
            self.broken(taken[0].where, f"member {way.sender}, who said this, left no trace")
            return
        sent = self.sent.get(way, [])
        may_go_on = self._tails_lost and not sender.is_whole
        places, connection = set(range(len(sent) + 1)), taken[0].connection
        for each in taken:
            if each.connection != connection:
                connection = each.connection
                places = set(range(min(places), len(sent) + 1))
            following = {p + 1 for p in places if p < len(sent) and sent[p] == each.message}
            if may_go_on and len(sent) in places:
                following.add(len(sent))
            if not following:
                text = f"{_show(each.message)} was taken, but not sent so in {sender.name}"
                self.broken(each.where, text)
                return
            places = following

    def _check_quorums(self) -> None:
        """In force by a majority of itself, and of the newest one that was in force before."""
        before: Roster | None = None
        for id_ in sorted(self.in_force):
            voters, where = self.in_force[id_]
            if id_ not in self.rosters:
                self.broken(where, f"roster {_name(id_)} is in force and nobody has accepted it")
                continue
            roster, _ = self.rosters[id_]
            for needed in (roster, before):
                if needed is not None and not needed.is_quorum(voters):
                    text = f"roster {_name(id_)} is in force by {len(voters)} accepts, which are "
                    self.broken(where, text + f"no quorum of roster {_name(needed.id)}")
            before = roster

    def _check_iterations(self) -> None:
        for epoch, commits in self.commits.items():
            for (older, _), (newer, where) in itertools.pairwise(commits):
                if newer <= older:
                    self.broken(where, f"{newer} is committed after {older} in epoch {epoch}")
        for epoch, ((_, restart), where) in self.restarts.items():
            if restart.restore is None:
                continue
            done = max((i for x, i in self.captured.items() if x < epoch), default=restart.restore)
            if any(i > restart.restore for i in self.damaged):
                continue  # The guarantee is of one fault at a time.
            if done - restart.restore > 1:
                text = f"epoch {epoch} goes back to {restart.restore} from {done}"
                self.broken(where, text)
            earlier = (said for x, said in self.commits.items() if x < epoch)
            newest = max((i for said in earlier for i, _ in said), default=restart.restore)
            if restart.restore < newest:
                text = f"epoch {epoch} goes back to {restart.restore}, {newest} was committed"
                self.broken(where, text)
        for count, where in self.reruns:
            if not self.damaged:
                self.broken(where, f"{count} iterations are run again")

    def _check_exits(self) -> None:
        for code, where in self.told_exits[1:]:
            first, there = self.told_exits[0]
            if code != first:
                self.broken(where, f"ends with {code}, and {there} with {first}")


class _Replay:
    """One guardian's trace through a fresh core."""

    def __init__(self, job: _Job, trace: Trace) -> None:
        self._job = job
        self._trace = trace
        self._core = Guardian(trace.settings, trace.me)
        self._connections: dict[_Way, int] = defaultdict(int)
        """How many have begun or ended, as far as this guardian knows."""
        self._accepted: dict[RosterId, set[MemberId]] = defaultdict(set)
        self._dialled: MemberId | None = None
        self._where = ""

    def run(self) -> None:
        """Up to the first difference."""
        job, core = self._job, self._core
        for number, step in enumerate(self._trace.steps, start=2):
            self._where = f"{self._trace.name}:{number}"
            if step.line != number:
                text = f"line {step.line} stands here: lines are missing or added"
                return job.broken(self._where, text)
            try:
                found = tuple(core.handle(step.event))
            except ProtocolError:
                found = ()  # The guardian hung up on the peer.
            except AssertionError as error:
                text = f"{_show(step.event)}: the core refuses it: {error}"
                return job.broken(self._where, text)
            if found != step.actions:
                return job.broken(self._where, _difference(step, found))
            self._note_event(step.event)
            for action in step.actions:
                self._note_action(action, step.event)
            for roster in (core.installed, *core.accepted):
                if roster is not None:
                    job.same(job.rosters, roster.id, roster, self._where, "roster")

    def _note_event(self, event: e.Event) -> None:
        job, me = self._job, self._trace.me.member
        match event:
            case e.FromFollower() | e.FromLeader():
                way = _Way(event.sender, me, isinstance(event, e.FromLeader))
                taken = _Taken(self._connections[way], event.message, self._where)
                job.taken[way].append(taken)
                job.num_messages += 1
                if isinstance(event.message, m.Accepted):
                    self._accepted[event.message.roster].add(event.sender)
            case e.FollowerGone():
                self._connections[_Way(event.sender, me, False)] += 1
            case e.LeaderGone():
                self._connections[_Way(event.sender, me, True)] += 1
            case e.Captured():
                newest = job.captured.get(event.epoch, event.iteration)
                job.captured[event.epoch] = max(newest, event.iteration)
            case e.TrainerSaid(message=m.Ready(iterations_rerun=count)) if count > job.most_rerun:
                job.reruns.append((count, self._where))
            case e.Damaged():
                job.damaged.add(event.iteration)

    def _note_action(self, action: e.Action, event: e.Event) -> None:
        job, me, where = self._job, self._trace.me.member, self._where
        match action:
            case e.ToLeader():
                leader = action.leader.member
                if leader != self._dialled:
                    self._dialled = leader
                    self._connections[_Way(leader, me, True)] += 1
                job.sent[_Way(me, leader, False)].append(action.message)
            case e.ToFollowers():
                for member in action.members:
                    job.sent[_Way(me, member, True)].append(action.message)
                self._note_said(action.message)
            case e.HangUp():
                for member in action.members:
                    self._connections[_Way(member, me, False)] += 1
            case e.AdoptPlan():
                plan = action.plan
                job.same(job.plans, plan.epoch, plan, where, "plan")
                job.same(job.holders, (plan.epoch, action.slot), me, where, "holder")
            case e.Exit():
                job.exits.append((action.exit_code, where))
                fenced = isinstance(event, e.FromLeader) and isinstance(event.message, m.Fenced)
                is_told = self._core.end is not None and not fenced
                if is_told and action.exit_code not in OUTSIDE:
                    job.told_exits.append((action.exit_code, where))

    def _note_said(self, message: m.Downstream) -> None:
        """What only a leader says."""
        job, me, where = self._job, self._trace.me.member, self._where
        match message:
            case m.Propose():
                job.same(job.proposers, message.id.epoch, me, where, "leader")
                if message.restart is not None:
                    said = (message.leader, message.restart)
                    job.same(job.restarts, message.id.epoch, said, where, "restart")
            case m.Resume():
                self._note_in_force(RosterId(message.epoch, 0))
            case m.Install():
                self._note_in_force(message.roster)
            case m.Committed():
                job.commits[message.epoch].append((message.iteration, where))

    def _note_in_force(self, roster: RosterId) -> None:
        voters = frozenset({*self._accepted[roster], self._trace.me.member})
        self._job.in_force[roster] = (voters, self._where)


@dataclasses.dataclass(frozen=True, slots=True)
class _Way:
    """Messages of one direction between two guardians."""

    sender: MemberId
    taker: MemberId
    is_downstream: bool


@dataclasses.dataclass(frozen=True, slots=True)
class _Taken:
    connection: int
    """The taker's count of connections of this way."""
    message: m.Upstream | m.Downstream
    where: str


# Words


def _difference(step: Step, found: tuple[e.Action, ...]) -> str:
    lines = [f"{_show(step.event)}: the core asks for something else"]
    lines += [f"    in the trace: {_show(x)}" for x in _without(step.actions, found)]
    lines += [f"    by the core:  {_show(x)}" for x in _without(found, step.actions)]
    if len(lines) == 1:
        lines.append("    the same actions in another order or number")
    return "\n".join(lines)


def _without(actions: Sequence[e.Action], others: Sequence[e.Action]) -> Iterator[e.Action]:
    return (action for action in actions if action not in others)


def _show(value: object) -> str:
    text = str(value)
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}..."


def _name(key: object) -> str:
    match key:
        case RosterId():
            return f"{key.epoch}.{key.version}"
        case (epoch, slot):
            return f"slot {slot} in epoch {epoch}"
    return f"epoch {key}"
