"""The leading part of a guardian: decides epochs, plans and the end.

Messages of followers in, actions out. What is done with each in each phase stands in `_TABLE`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from deadpool.protocol import messages as m
from deadpool.protocol.ballot import Ballot
from deadpool.protocol.commits import Commits
from deadpool.protocol.events import (
    Action,
    EnterPhase,
    Exit,
    HangUp,
    Lacks,
    Observe,
    Probe,
    RosterInstalled,
    StopTrainer,
    SuspectCorruption,
    ToFollowers,
)
from deadpool.protocol.placement import (
    Grid,
    assign_slots,
    choose_restore_point,
    newest_kept,
)
from deadpool.protocol.rosters import difference, in_order, whole
from deadpool.protocol.types import (
    EXIT_DEADLINE,
    EXIT_FAILED,
    EXIT_FENCED,
    EXIT_NO_CONSISTENT_STATE,
    EXIT_SPARES_EXHAUSTED,
    HUNG,
    NON_FINITE,
    Bounds,
    End,
    Epoch,
    Iteration,
    Member,
    MemberId,
    Node,
    Phase,
    ProtocolError,
    Restart,
    Roster,
    RosterId,
    Slot,
)

PROGRAM_FAULTS = frozenset({"SIGSEGV", "SIGBUS", "SIGFPE", "SIGILL", "SIGABRT", HUNG})
"""Ways in which a program ends, or stops, by itself. Others come from outside, again by chance."""

MAX_FAILED_REGROUPS = 5
"""Attempts to build groups and restore without a commit in between, before the job ends."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What every guardian of a job is told alike."""

    grid: Grid
    num_spare_nodes: int
    """Complete nodes beyond the grid at launch."""
    replicas: int
    """Of each slot's snapshots, each on another node."""
    bounds: Bounds
    max_respawns: int = 3
    """Trainers that a guardian starts in the place of dead ones within `respawn_window`."""
    respawn_window: int = 3600
    """In ticks."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StepDown:
    """For the guardian around it: this leader is none any more, for want of a majority."""


class Leader:
    """One leadership; it begins with `form`, `succeed` or `take_over_end`.

    rosters: all that may be in force: their majorities are asked. members: those alive, oldest
    first.
    """

    def __init__(
        self,
        settings: Settings,
        me: Member,
        *,
        phase: Phase,
        epoch: Epoch,
        members: Iterable[Member],
        rosters: Iterable[Roster] = (),
    ) -> None:
        self._settings = settings
        self._grid = settings.grid
        self._me = me
        self.phase = phase
        self.epoch = epoch
        self.members: dict[MemberId, Member] = {member.member: member for member in members}
        self.rosters: dict[RosterId, Roster] = {roster.id: roster for roster in rosters}
        self.nodes_lost: list[Node] = []
        """Lost since the job last trained, in the order of the news."""
        self.committed: Iteration | None = None
        self.end: End | None = None
        self._heard: dict[MemberId, int] = dict.fromkeys(self.members, 0)
        """When each member was last heard, in ticks of this leadership."""
        self._connected: set[MemberId] = set()
        self._cut_off: set[MemberId] = set()
        """Members whose connection ended: they come back, or are found dead or silent."""
        self._now = 0
        self._entered = 0
        """When the phase began."""
        self._store = me.member
        """Whose trainer opens the rendezvous store of the announced epoch."""
        self._aborted: dict[MemberId, m.Aborted] = {}
        self._promises = Ballot(())
        self._roster: Roster | None = max(self.rosters.values(), key=lambda r: r.id, default=None)
        """The newest proposed or known one."""
        self._accepts: Ballot | None = None
        """While a proposed roster is not in force."""
        self._knows: set[MemberId] = set()
        """Members that were sent `_roster` on the connection that they have, and so know it before
        whatever follows: differences do for them."""
        self._unaware = False
        """A member of `_roster` joined anew, and does not know it."""
        self._slot_of: dict[MemberId, Slot] = {}
        if self._roster is not None:
            self._slot_of = {member: Slot(s) for s, member in enumerate(self._roster.slots)}
        self._has_trained = bool(self.rosters)
        self._ready: set[MemberId] = set()
        self._finished: set[MemberId] = set()
        self._stepped: set[MemberId] = set()
        self._commits = Commits(settings.grid.world_size)
        self._num_failed_regroups = 0
        self._drains = False
        self._last_fault: tuple[Iteration, str] | None = None
        """Iteration and kind of the last error that was mended by going back."""
        self._respawned: dict[Node, str] = {}
        """Nodes whose trainers were started anew since the job last trained, and why."""
        self._crashes: dict[tuple[Iteration | None, str, Slot], Node] = {}
        """The node on which a slot's program first crashed, by last commit and signal."""
        self._lacking_since: int | None = None
        """When it first had no node for every slot."""
        self._suspicion: SuspectCorruption | None = None
        """What it will be unless the fault comes again."""
        self._noted: set[MemberId] = set()

    # How a leadership begins

    @classmethod
    def form(cls, settings: Settings, me: Member) -> Leader:
        """Of the launch: waits for everybody to join."""
        return cls(settings, me, phase=Phase.FORMING, epoch=Epoch(0), members=())

    @classmethod
    def succeed(
        cls,
        settings: Settings,
        me: Member,
        *,
        rosters: Sequence[Roster],
        lost: Member | None,
        promised: Epoch,
    ) -> tuple[Leader, list[Action | StepDown]]:
        """After `lost`, whose node counts as lost; None after a leadership of this same guardian
        that reached no majority. promised: the newest epoch that any supporter has entered."""
        newest = max(rosters, key=lambda r: r.id)
        gone = [x.member for x in newest.members if lost is not None and x.node == lost.node]
        alive = [x for x in newest.members if x.member not in gone]
        leader = cls(
            settings, me, phase=Phase.ABORTING, epoch=promised, members=alive, rosters=rosters
        )
        if lost is not None and any(member in leader._slot_of for member in gone):
            leader.nodes_lost.append(lost.node)
        return leader, leader._announce()

    @classmethod
    def take_over_end(
        cls,
        settings: Settings,
        me: Member,
        *,
        end: End,
        members: Iterable[Member],
        rosters: Sequence[Roster],
    ) -> tuple[Leader, list[Action | StepDown]]:
        """The leader was lost while it told the end: go on telling it. end: of a new epoch."""
        leader = cls(
            settings, me, phase=Phase.ENDING, epoch=end.epoch, members=members, rosters=rosters
        )
        leader._connected = set(leader.members)
        return leader, leader._finish(end)

    # Events

    def handle(self, sender: MemberId, message: m.Upstream) -> list[Action | StepDown]:
        """A follower's message. Raises ProtocolError for a pair that cannot be."""
        try:
            handler = _TABLE[self.phase][type(message)]
        except KeyError:
            raise ProtocolError(
                f"{type(message).__name__} in phase {self.phase.value} of epoch {self.epoch}"
            ) from None
        if sender in self.members:
            self._heard[sender] = self._now
            self._connected.add(sender)
            self._cut_off.discard(sender)
        elif not isinstance(message, m.Join | m.Support):
            return []  # Of a member that is lost; its connection is being closed.
        return handler(self, sender, message)

    def gone(self, sender: MemberId, reason: str) -> list[Action | StepDown]:
        """A follower's connection ended."""
        self._connected.discard(sender)
        member = self.members.get(sender)
        if member is None:
            return []
        if self.phase is Phase.FORMING:
            return self._halt(
                f"node {member.node} was lost before the job had formed: {reason}", EXIT_FAILED
            )
        if self.phase is Phase.ENDING:
            # It comes back to hear the end, or that all may leave; or it is dead.
            self._cut_off.add(sender)
            return [Probe(member=member)]
        return self._cut(member)

    def _cut(self, member: Member) -> list[Action | StepDown]:
        """What was under way to a live member is lost with its connection: a new epoch says it
        again. Whether the member lives, a probe or its return tells."""
        self._cut_off.add(member.member)
        self._knows.discard(member.member)
        probe: list[Action | StepDown] = [Probe(member=member)]
        concerns = member.member in self._slot_of or self.phase is not Phase.TRAINING
        if concerns and not (self.phase is Phase.ABORTING and member.member not in self._aborted):
            return [*self._announce(), *probe]
        return probe

    def dead(self, member: MemberId) -> list[Action | StepDown]:
        """A probe's answer."""
        if member not in self.members or member in self._connected:
            return []
        if self.phase is Phase.FORMING:
            return self.gone(member, "its process is gone")
        if self.phase is Phase.ENDING:
            del self.members[member]
            self._cut_off.discard(member)
            return self._leave_when_noted()
        return self._lose([self.members[member].node], "its process is gone")

    def tick(self) -> list[Action | StepDown]:
        self._now += 1
        bounds = self._settings.bounds
        everybody = tuple(self.members)
        actions: list[Action | StepDown] = []
        if everybody:
            actions.append(ToFollowers(members=everybody, message=m.Heartbeat()))
        in_phase = self._now - self._entered
        if self.phase is Phase.ENDING:
            if in_phase > bounds.minority or (in_phase > bounds.leave and self._is_decided):
                actions += self._leave()
            return actions
        silent = [x for x in everybody if self._now - self._heard[x] > self._patience(x)]
        if self.phase is Phase.FORMING:
            if in_phase > bounds.start:
                return actions + self._halt(
                    f"only {len(everybody)} of {self._num_expected} guardians came in time",
                    EXIT_DEADLINE,
                )
            return actions + (self.gone(silent[0], "no heartbeat") if silent else [])
        if silent:
            nodes = [self.members[member].node for member in silent]
            return actions + self._lose(nodes, "no heartbeat")
        since = self._lacking_since
        if since is not None and self._now - since > bounds.lack:
            return actions + self._exhausted("no node joined in time to replace it")
        if self.phase is Phase.ABORTING:
            actions += [
                Probe(member=member)
                for member in self.members.values()
                if member.member not in self._connected and member.member != self._me.member
            ]
            if in_phase > bounds.silence and not self._waiting_for() and not self.is_lacking:
                return [*actions, StepDown()]  # All have answered and are no majority.
        bound = bounds.recovery if self.committed is not None else bounds.start
        is_waiting = self.phase in (Phase.ABORTING, Phase.REGROUPING)
        if is_waiting and in_phase > bound and (self._waiting_for() or not self.is_lacking):
            return actions + self._too_late()
        return actions

    def _patience(self, member: MemberId) -> int:
        """Ticks. Who has never spoken to this leader may follow the one before, which others lost
        and which needs as long to notice that."""
        bounds = self._settings.bounds
        has_spoken = member in self._connected or member in self._cut_off
        return bounds.silence + (0 if has_spoken else bounds.seek)

    # Joining

    @property
    def _num_expected(self) -> int:
        return self._grid.world_size + self._settings.num_spare_nodes * self._grid.ranks_per_node

    def _join_forming(self, sender: MemberId, message: m.Join) -> list[Action | StepDown]:
        self._admit(message.member)
        actions: list[Action | StepDown] = [ToFollowers(members=(sender,), message=m.Welcome())]
        if len(self.members) < self._num_expected:
            return actions
        ordered = sorted(self.members.values(), key=lambda x: (x.local_rank, x.node, x.member))
        self.members = {member.member: member for member in ordered}
        return actions + self._announce()

    def _admit(self, member: Member) -> None:
        self._knows.discard(member.member)
        if self._roster is not None and self._roster.find(member.member) is not None:
            self._unaware = True
        self.members[member.member] = member
        self._heard[member.member] = self._now
        self._connected.add(member.member)

    def _join_running(self, sender: MemberId, message: m.Join) -> list[Action | StepDown]:
        member = message.member
        twin = next(
            (
                x
                for x in self.members.values()
                if (x.node, x.local_rank) == (member.node, member.local_rank)
            ),
            None,
        )
        actions: list[Action | StepDown] = []
        if twin is not None and twin.member != sender:
            if twin.member in self._connected:
                reason = f"node {member.node} is in the job and alive"
                return [
                    ToFollowers(members=(sender,), message=m.Fenced(reason=reason)),
                    HangUp(members=(sender,)),
                ]
            actions += self._lose([twin.node], "it came back under the same name")
        self._admit(member)
        actions.append(ToFollowers(members=(sender,), message=m.Welcome()))
        if self.phase is Phase.ABORTING:
            actions.append(self._abort_message((sender,)))
        elif self.phase is Phase.TRAINING:
            actions += self._update_roster()
        return actions

    def _join_ending(self, sender: MemberId, message: m.Join) -> list[Action | StepDown]:
        assert self.end is not None
        self._admit(message.member)
        return [ToFollowers(members=(sender,), message=m.Ended(end=self.end))]

    # Losses

    def _lose(self, nodes: Iterable[Node], reason: str) -> list[Action | StepDown]:
        """Whole nodes go. Without slots: out of the next roster. With slots: a new epoch. Where
        no majority would be left it is this leader that is cut off: nobody is fenced by it."""
        nodes = sorted(set(nodes))
        gone = {x.member for x in self.members.values() if x.node in nodes}
        left = self.members.keys() - gone
        if not all(roster.is_quorum(left) for roster in self.rosters.values()):
            return [StepDown()]
        fence, had_slots = self._fence(nodes, reason)
        if self._me.node in nodes:
            # The successor names the node; here is nobody left to lead from.
            end = End(epoch=self.epoch, exit_code=EXIT_FENCED, reason=reason)
            return [*fence, StopTrainer(end=end), Exit(exit_code=EXIT_FENCED, reason=reason)]
        has_answered = not gone.isdisjoint(self._aborted)
        if self.phase is Phase.ABORTING and not has_answered and self._store not in gone:
            return fence + self._plan_when_all_answered()  # The epoch has not begun for them.
        if had_slots or self.phase is Phase.ABORTING:
            if not self._has_trained and self.phase is Phase.REGROUPING:
                return fence + self._halt(self._lost_too_early(reason), EXIT_FAILED)
            return fence + self._announce()
        if self.phase is Phase.TRAINING:
            return fence + self._update_roster()
        return fence

    def _fence(self, nodes: Sequence[Node], reason: str) -> tuple[list[Action | StepDown], bool]:
        """Their members are told and forgotten. And whether any held slots."""
        gone = tuple(x for x in self.members.values() if x.node in nodes)
        had_slots = False
        for member in gone:
            del self.members[member.member]
            self._connected.discard(member.member)
            self._cut_off.discard(member.member)
            self._knows.discard(member.member)
            if member.member in self._slot_of:
                had_slots, self._last_fault = True, None
                self._respawned.pop(member.node, None)
                if member.node not in self.nodes_lost:
                    self.nodes_lost.append(member.node)
        others = tuple(x.member for x in gone if x.member != self._me.member)
        fenced = ToFollowers(members=others, message=m.Fenced(reason=reason))
        return [fenced, HangUp(members=others)] if others else [], had_slots

    def _lost_too_early(self, reason: str) -> str:
        nodes = ", ".join(map(str, self.nodes_lost))
        what = f"node {nodes} was lost" if nodes else "an epoch failed"
        return f"{what} before the first snapshot was complete: {reason}"

    def _trainer_lost(self, sender: MemberId, message: m.TrainerLost) -> list[Action | StepDown]:
        node = self.members[sender].node
        if self.phase is Phase.FORMING:
            return self._halt(
                f"node {node} was lost before the job had formed: {message.reason}", EXIT_FAILED
            )
        return self._lose([node], message.reason)

    def _trainer_crashed(
        self, sender: MemberId, message: m.TrainerCrashed
    ) -> list[Action | StepDown]:
        """A slot whose program crashes at one place again is given to another node; where it does
        so there, too, the fault is the program's."""
        node = self.members[sender].node
        if sender in self._slot_of:
            self._respawned[node] = message.kind
        has_part = sender in self._slot_of or sender == self._store
        if self.phase is Phase.ABORTING:
            has_part = sender in self._aborted
        if message.kind == HUNG:
            self._last_fault = None  # This explains it.
        if message.epoch != self.epoch or not (has_part or message.kind == HUNG):
            return []  # It answers what is announced, or will be, with its new trainer.
        if not self._has_trained and self.phase is Phase.REGROUPING:
            return self._halt(self._lost_too_early(message.reason), EXIT_FAILED)
        if message.kind in PROGRAM_FAULTS and sender in self._slot_of:
            slot = self._slot_of[sender]
            place = (self.committed, message.kind, slot)
            before = self._crashes.get(place)
            if before == node:
                return self._lose([node], f"{message.reason} again in the same iteration")
            if before is not None:
                what = "hung" if message.kind == HUNG else f"ended with {message.kind}"
                return self._halt(
                    f"the trainer of slot {slot} {what} in the iteration after "
                    f"{self.committed} on node {before}, twice, and again on node {node}",
                    EXIT_FAILED,
                )
            self._crashes[place] = node
        return self._announce() if has_part else []

    def _waiting_for(self) -> list[MemberId]:
        """Members that the phase cannot end without and that have not answered."""
        if self.phase is Phase.ABORTING:
            return [member for member in self.members if member not in self._aborted]
        return [member for member in self._slot_of if member not in self._ready]

    def _too_late(self) -> list[Action | StepDown]:
        late = self._waiting_for()
        if not late:
            return [StepDown()]
        slots = sorted(self._slot_of[x] for x in late if x in self._slot_of)
        words = (
            f"epoch {self.epoch} did not get past {self.phase.value} in time; no answer from slots "
            f"{', '.join(map(str, slots))}"
        )
        if 2 * len(slots) > self._grid.world_size:
            return self._halt(words, EXIT_DEADLINE)
        return self._lose([self.members[x].node for x in late if x in self.members], words)

    # Epochs

    def _enter(self, phase: Phase, **more: Any) -> EnterPhase:
        self.phase, self._entered = phase, self._now
        return EnterPhase(
            epoch=self.epoch,
            phase=phase,
            nodes_lost=tuple(self.nodes_lost),
            respawned=tuple(sorted(self._respawned.items())),
            **more,
        )

    def _announce(self, likely: Sequence[MemberId] = ()) -> list[Action | StepDown]:
        """A new epoch: everybody stands still and says what it holds. likely: who will have the
        slots, where that is known better than by the newest roster."""
        self.epoch = Epoch(self.epoch + 1)
        self._aborted.clear()
        self._ready.clear()
        self._finished.clear()
        self._stepped.clear()
        self._accepts = None
        self._promises = Ballot(self.rosters.values())
        known = self._roster.slots if self._roster is not None else self._assign() or ()
        slots = likely or known
        there = self.members.keys() - self._cut_off
        self._store = next((x for x in slots if x in there), self._me.member)
        for member in self.members:
            self._heard[member] = self._now
        return [self._enter(Phase.ABORTING), self._abort_message(tuple(self.members))]

    def _abort_message(self, members: tuple[MemberId, ...]) -> ToFollowers:
        message = m.Abort(epoch=self.epoch, store_member=self._store)
        return ToFollowers(members=members, message=message)

    def _assign(self) -> tuple[MemberId, ...] | None:
        return assign_slots(
            self._grid,
            self.members.values(),
            {x: ack.slot for x, ack in self._aborted.items() if ack.slot is not None},
            {x for x, ack in self._aborted.items() if ack.has_state},
        )

    def _take_support(self, sender: MemberId, message: m.Support) -> list[Action | StepDown]:
        if sender not in self.members:
            reason = f"the job went on in epoch {self.epoch} without this node"
            return [
                ToFollowers(members=(sender,), message=m.Fenced(reason=reason)),
                HangUp(members=(sender,)),
            ]
        if self.phase is Phase.TRAINING and sender not in self._slot_of:
            if message.promised == self.epoch:
                self._admit(message.member)
                welcome = ToFollowers(members=(sender,), message=m.Welcome())
                return [welcome, *self._update_roster()]
            return self._lose([message.member.node], "it missed the epoch")
        if self.phase is not Phase.ABORTING:
            self.epoch = Epoch(max(self.epoch, message.promised))
            return self._announce()
        if message.promised >= self.epoch:
            self.epoch = message.promised
            return self._announce()
        return [self._abort_message((sender,))]

    def _support_ending(self, sender: MemberId, message: m.Support) -> list[Action | StepDown]:
        assert self.end is not None
        if message.promised > self.epoch:
            return []  # It would not note this end.
        self._admit(message.member)
        return [ToFollowers(members=(sender,), message=m.Ended(end=self.end))]

    def _take_aborted(self, sender: MemberId, message: m.Aborted) -> list[Action | StepDown]:
        if message.epoch != self.epoch:
            return []
        self._aborted[sender] = message
        self._promises.add(sender)
        return self._plan_when_all_answered()

    def _plan_when_all_answered(self) -> list[Action | StepDown]:
        if (
            len(self._aborted) < len(self.members)
            or not self.members.keys() <= self._aborted.keys()
        ):
            return []  # The first for speed: once a message, it may not look at every member.
        unknown = self._unknown_roster()
        if unknown is not None:
            wanted = m.RosterWanted(epoch=self.epoch)
            return [ToFollowers(members=(unknown,), message=wanted)]
        return self._send_plan() if self._promises.is_passed else []

    def _unknown_roster(self) -> MemberId | None:
        """A member that has accepted a roster which this leader has not heard of."""
        known = self._roster.id if self._roster is not None else RosterId(Epoch(0), 0)
        for member, ack in self._aborted.items():
            if ack.accepted is not None and ack.accepted > known and member in self.members:
                return member
        return None

    def _take_roster(self, sender: MemberId, message: m.RosterIs) -> list[Action | StepDown]:
        """It may be in force: its majority is asked too, in a new epoch."""
        roster, known = message.roster, self._roster
        if message.epoch != self.epoch:
            return []
        self.rosters.setdefault(roster.id, roster)
        ack = self._aborted.get(sender)
        if ack is None or roster.id != ack.accepted or (known and roster.id <= known.id):
            return []  # The sender's newest comes last.
        before = {x.member: x.node for x in known.members} if known is not None else {}
        lost = {node for member, node in before.items() if member not in self.members}
        named = {x.member for x in roster.members}
        dropped = {before[x] for x in self.members if x in before and x not in named}
        self._roster = roster
        self._slot_of = {member: Slot(s) for s, member in enumerate(roster.slots)}
        reason = "a newer roster is without it"
        if self._me.node in dropped:
            return self._lose(dropped, reason)
        fence, _ = self._fence(sorted(dropped), reason)
        for member in roster.members:
            if member.node not in lost:
                self.members.setdefault(member.member, member)
        return [*fence, *self._announce()]

    def _send_plan(self) -> list[Action | StepDown]:
        acks = self._aborted
        in_force = max((a.installed for a in acks.values() if a.installed), default=None)
        commits = [ack.committed for ack in acks.values() if ack.committed is not None]
        self.committed = max(commits, default=None)
        slots = self._assign()
        if slots is None:
            return self._lack()
        self._lacking_since = None
        if self._store not in slots:
            return self._announce(likely=slots)  # Nodes came that go first.
        restore: Iteration | None = None
        sources: dict[Slot, MemberId] = {}
        if self.rosters:
            # Not the launch any more, even if only spares are left of it.
            holdings = {member: acks[member].holdings for member in self.members}
            point = choose_restore_point([(Slot(s), x) for s, x in enumerate(slots)], holdings)
            trained = any(a.has_state or a.committed is not None for a in acks.values())
            if point is None or not trained:
                return self._nothing_to_restore()
            restore, sources = point
        base = self._roster
        roster = Roster(
            id=RosterId(self.epoch, 0),
            members=in_order(self._me, self._roster, self.members),
            slots=slots,
        )
        replaced = tuple(Slot(s) for s, member in enumerate(slots) if not acks[member].has_state)
        restart = Restart(
            restore=restore,
            replaced=replaced,
            sources=tuple(sorted(sources.items())),
            store_slot=Slot(slots.index(self._store)),
            store_port=acks[self._store].store_port,
        )
        self.rosters = {
            id_: r for id_, r in self.rosters.items() if in_force is None or id_ >= in_force
        }
        if not self.rosters:
            self.rosters[roster.id] = roster  # The launch's: there is none before it to ask.
        self._accepts = Ballot([*self.rosters.values(), roster])
        self._roster = roster
        self._slot_of = {member: Slot(s) for s, member in enumerate(slots)}
        self._commits = Commits(self._grid.world_size)
        new = {self.members[slots[slot]].node for slot in replaced} if restore is not None else ()
        spares = set(new) - self._respawned.keys()
        return [
            self._enter(Phase.REGROUPING, spares_used=tuple(sorted(spares)), restore=restore),
            *self._propose(roster, base, restart),
        ]

    def _lack(self) -> list[Action | StepDown]:
        """Everybody stands still. A node that joins is asked like the others; and then, or when
        another is lost, comes the next try."""
        if self._settings.bounds.lack:
            is_news = self._lacking_since is None
            self._lacking_since = self._now if self._lacking_since is None else self._lacking_since
            return [Lacks(nodes_lost=tuple(self.nodes_lost))] if is_news else []
        return self._exhausted("no complete spare node is left")

    def _exhausted(self, why: str) -> list[Action | StepDown]:
        """What memory holds is kept on disk: nothing that was committed is lost."""
        acks = {x: ack for x, ack in self._aborted.items() if x in self.members}
        kept = newest_kept(
            self._grid.world_size,
            {x: ack.holdings for x, ack in acks.items()},
            {x: ack.slot for x, ack in acks.items() if ack.slot is not None},
        )
        lost = ", ".join(map(str, self.nodes_lost))
        end = End(
            epoch=self.epoch,
            exit_code=EXIT_SPARES_EXHAUSTED,
            reason=f"node {lost} was lost and {why}; start the job again with more --spare-nodes",
            keep=kept[0] if kept is not None else None,
            orphans=kept[1] if kept is not None else (),
        )
        return self._finish(end)

    @property
    def is_lacking(self) -> bool:
        """All stand still for want of a node."""
        return self._lacking_since is not None

    def _nothing_to_restore(self) -> list[Action | StepDown]:
        if self.committed is None and any(ack.slot is not None for ack in self._aborted.values()):
            return self._halt(self._lost_too_early("start the job again"), EXIT_FAILED)
        lost = ", ".join(map(str, self.nodes_lost))
        return self._halt(
            f"after the loss of node {lost} no iteration is left that every slot can be restored "
            "to from memory; resume from the last checkpoint with --load",
            EXIT_NO_CONSISTENT_STATE,
        )

    def _propose(
        self, roster: Roster, base: Roster | None, restart: Restart | None
    ) -> list[Action | StepDown]:
        """Differences to those who know the base, everything to the others."""
        everybody = tuple(x.member for x in roster.members)
        knows = self._knowing(base) if base is not None else set()
        self._unaware, self._knows = False, set(everybody)
        aware = tuple(x for x in everybody if x in knows)
        others = tuple(x for x in everybody if x not in knows)
        actions: list[Action | StepDown] = []
        if base is not None and aware:
            message = difference(roster, base, restart)
            actions.append(ToFollowers(members=aware, message=message))
        if others:
            actions.append(ToFollowers(members=others, message=whole(roster, restart)))
        return actions

    def _knowing(self, base: Roster) -> set[MemberId]:
        if self.phase is Phase.REGROUPING:
            return {x for x, ack in self._aborted.items() if ack.accepted == base.id}
        return self._knows

    def _take_accepted(self, sender: MemberId, message: m.Accepted) -> list[Action | StepDown]:
        if self._roster is None or message.roster != self._roster.id:
            return []
        self._knows.add(sender)
        if self._accepts is None:
            return []
        self._accepts.add(sender)
        if self.phase is Phase.REGROUPING:
            return self._resume_when_ready()
        if not self._accepts.is_passed:
            return []
        return [*self._install(), *self._update_roster()]

    def _take_ready(self, sender: MemberId, message: m.Ready) -> list[Action | StepDown]:
        if message.epoch != self.epoch or sender not in self._slot_of:
            return []
        self._ready.add(sender)
        return [self._observe(sender, message), *self._resume_when_ready()]

    def _resume_when_ready(self) -> list[Action | StepDown]:
        assert self._accepts is not None and self._roster is not None
        if len(self._ready) < self._grid.world_size or not self._accepts.is_passed:
            return []
        self._has_trained = True
        resume = ToFollowers(
            members=tuple(x.member for x in self._roster.members),
            message=m.Resume(epoch=self.epoch),
        )
        return [
            self._enter(Phase.TRAINING),
            resume,
            *self._drain_trainers(),
            *self._install(tell=False),
            *self._update_roster(),
        ]

    def _install(self, *, tell: bool = True) -> list[Action | StepDown]:
        assert self._roster is not None
        self._accepts = None
        self.rosters = {self._roster.id: self._roster}
        members = self._roster.members
        told = ToFollowers(
            members=tuple(x.member for x in members), message=m.Install(roster=self._roster.id)
        )
        return [*([told] if tell else []), RosterInstalled(members=members)]

    def _update_roster(self) -> list[Action | StepDown]:
        """Spares have come or gone while all slots train: one change at a time."""
        base = self._roster
        assert base is not None
        is_new = self._unaware or self.members.keys() != {x.member for x in base.members}
        if self._accepts is not None or not is_new:
            return []
        self._roster = Roster(
            id=RosterId(self.epoch, base.id.version + 1),
            members=in_order(self._me, self._roster, self.members),
            slots=base.slots,
        )
        self._accepts = Ballot([*self.rosters.values(), self._roster])
        return self._propose(self._roster, base, None)

    def _regroup_failed(
        self, sender: MemberId, message: m.RegroupFailed
    ) -> list[Action | StepDown]:
        if message.epoch != self.epoch:
            return []
        self._num_failed_regroups += 1
        if self._num_failed_regroups > MAX_FAILED_REGROUPS:
            return self._halt(
                f"process groups could not be rebuilt in {MAX_FAILED_REGROUPS} attempts although "
                f"no node is lost: {message.reason}",
                EXIT_DEADLINE,
            )
        return self._announce()

    # Training

    def _take_staged(self, sender: MemberId, message: m.Staged) -> list[Action | StepDown]:
        if message.epoch != self.epoch or sender not in self._slot_of:
            return []
        if not self._commits.stage(sender, message.iteration):
            return []
        self.committed = message.iteration
        self._num_failed_regroups = 0
        assert self._roster is not None
        committed = m.Committed(epoch=self.epoch, iteration=message.iteration)
        told: list[Action | StepDown] = [ToFollowers(members=self._roster.slots, message=committed)]
        if self._suspicion is not None and message.iteration >= self._suspicion.iteration:
            told.append(self._suspicion)
            self._suspicion = None
        return told

    def _take_first_step(self, sender: MemberId, message: m.FirstStep) -> list[Action | StepDown]:
        if message.epoch != self.epoch:
            return []
        self._stepped.add(sender)
        if len(self._stepped) == self._grid.world_size:
            self.nodes_lost.clear()
            self._respawned.clear()
        return [self._observe(sender, message)]

    def _drain(self, sender: MemberId, message: m.DrainWanted) -> list[Action | StepDown]:
        self._drains = True
        return self._drain_trainers() if self.phase is Phase.TRAINING else []

    def _drain_trainers(self) -> list[Action | StepDown]:
        if not self._drains:
            return []
        return [ToFollowers(members=tuple(self._slot_of), message=m.Drain())]

    def _observe(self, sender: MemberId, message: m.Upstream) -> Observe:
        return Observe(node=self.members[sender].node, message=message)

    # The end

    def _take_finished(self, sender: MemberId, message: m.Finished) -> list[Action | StepDown]:
        if message.epoch != self.epoch:
            return []
        self._finished.add(sender)
        if len(self._finished) < self._grid.world_size:
            return []
        return self._finish(End(epoch=self.epoch, exit_code=0, reason=""))

    def _faltered(self, sender: MemberId, message: m.Faltered) -> list[Action | StepDown]:
        """Everybody goes back to the last snapshot and tries again, once: the same fault again,
        with no node lost in between, would come for ever."""
        if message.epoch != self.epoch:
            return []
        fault = (message.iteration, message.kind)
        if fault == self._last_fault:
            return self._halt(
                f"node {self.members[sender].node}: iteration {message.iteration} failed again "
                f"after it was run anew from the last snapshot: {message.reason}",
                EXIT_FAILED,
            )
        self._last_fault = fault
        if message.kind == NON_FINITE:
            self._suspicion = SuspectCorruption(
                node=self.members[sender].node, iteration=message.iteration, reason=message.reason
            )
        return [self._observe(sender, message), *self._announce()]

    def _failed(self, sender: MemberId, message: m.Failed) -> list[Action | StepDown]:
        return self._halt(f"node {self.members[sender].node}: {message.reason}", message.exit_code)

    def _end_wanted(self, sender: MemberId, message: m.EndWanted) -> list[Action | StepDown]:
        return self._halt(message.reason, message.exit_code)

    def _halt(self, reason: str, exit_code: int) -> list[Action | StepDown]:
        return self._finish(End(epoch=self.epoch, exit_code=exit_code, reason=reason))

    def _finish(self, end: End) -> list[Action | StepDown]:
        """Told to all, noted by all, then all leave: were the leader lost in between, somebody
        who knows is still there for those who do not."""
        self.end = end
        ended = ToFollowers(members=tuple(self.members), message=m.Ended(end=end))
        return [self._enter(Phase.ENDING), ended]

    def _end_noted(self, sender: MemberId, message: m.EndNoted) -> list[Action | StepDown]:
        self._noted.add(sender)
        return self._leave_when_noted()

    def _leave_when_noted(self) -> list[Action | StepDown]:
        if len(self._noted) < len(self.members):
            return []  # For speed: asked once a member, it may not look at all of them.
        if self._cut_off or not self.members.keys() <= self._noted or not self._is_decided:
            return []
        return self._leave()

    @property
    def _is_decided(self) -> bool:
        """Until a majority has noted it, others may decide another end, or go on."""
        return all(roster.is_quorum(self._noted) for roster in self.rosters.values())

    def _leave(self) -> list[Action | StepDown]:
        if not self._is_decided:
            return [StepDown()]
        return [ToFollowers(members=tuple(self.members), message=m.Leave())]

    def _ignore(self, sender: MemberId, message: m.Upstream) -> list[Action | StepDown]:
        """Of an epoch or a phase that has passed; or of no consequence."""
        return []


_Handler = Callable[[Leader, MemberId, Any], list[Action | StepDown]]

_NO_EFFECT = (
    m.Accepted, m.Aborted, m.RosterIs, m.Ready, m.RegroupFailed, m.Staged, m.FirstStep,
    m.Finished, m.Faltered, m.EndNoted, m.Heartbeat,
)  # fmt: skip
_ALWAYS: dict[type, _Handler] = dict.fromkeys(_NO_EFFECT, Leader._ignore)

_WHILE_RUNNING: dict[type, _Handler] = {
    **_ALWAYS,
    m.Join: Leader._join_running,
    m.Support: Leader._take_support,
    m.TrainerCrashed: Leader._trainer_crashed,
    m.TrainerLost: Leader._trainer_lost,
    m.Failed: Leader._failed,
    m.EndWanted: Leader._end_wanted,
    m.DrainWanted: Leader._drain,
}

_TABLE: dict[Phase, dict[type, _Handler]] = {
    Phase.FORMING: {
        **_WHILE_RUNNING,
        m.Join: Leader._join_forming,
        m.TrainerCrashed: Leader._ignore,
    },
    Phase.ABORTING: {
        **_WHILE_RUNNING,
        m.Aborted: Leader._take_aborted,
        m.RosterIs: Leader._take_roster,
    },
    Phase.REGROUPING: {
        **_WHILE_RUNNING,
        m.Accepted: Leader._take_accepted,
        m.Ready: Leader._take_ready,
        m.Staged: Leader._take_staged,
        m.RegroupFailed: Leader._regroup_failed,
    },
    Phase.TRAINING: {
        **_WHILE_RUNNING,
        m.Accepted: Leader._take_accepted,
        m.RegroupFailed: Leader._regroup_failed,
        m.Staged: Leader._take_staged,
        m.FirstStep: Leader._take_first_step,
        m.Finished: Leader._take_finished,
        m.Faltered: Leader._faltered,
    },
    Phase.ENDING: {
        **_ALWAYS,
        m.Join: Leader._join_ending,
        m.Support: Leader._support_ending,
        m.TrainerCrashed: Leader._ignore,
        m.TrainerLost: Leader._ignore,
        m.Failed: Leader._ignore,
        m.EndWanted: Leader._ignore,
        m.DrainWanted: Leader._ignore,
        m.EndNoted: Leader._end_noted,
    },
}
"""What is done with each message in each phase."""
