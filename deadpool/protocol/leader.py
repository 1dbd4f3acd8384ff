"""The leader: decides epochs. Events in, actions out; no clock, no socket, no thread.

Whoever runs it feeds every event through `Leader.handle` and carries out what comes back, in
order. Deadlines are events too: a `SetDeadline` action asks for `DeadlinePassed` after a while.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from deadpool.protocol.placement import (
    Grid,
    choose_holders,
    choose_restore_point,
    choose_spare,
    node_position,
)
from deadpool.protocol.types import (
    Epoch,
    Holdings,
    Iteration,
    Member,
    MemberId,
    Node,
    Phase,
    Plan,
    Slot,
)

MAX_FAILED_REGROUPS = 5
"""Attempts to build groups without a new loss, one after the other, before the job ends."""

# Events


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Joined:
    """A guardian said hello and its trainer is up."""

    member: Member


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Lost:
    """A guardian's connection ended, or its trainer died: its node is lost."""

    member: MemberId
    reason: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Aborted:
    """The member's trainer stands outside every collective."""

    member: MemberId
    epoch: Epoch
    store_port: int
    """Of a fresh rendezvous store in its trainer; 0 where none was asked for."""
    holdings: Holdings


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Ready:
    """The member's groups are built, its state restored and compared with its peers'."""

    member: MemberId
    epoch: Epoch


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RegroupFailed:
    """Groups could not be built although no member is known to be lost."""

    member: MemberId
    epoch: Epoch
    reason: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Staged:
    """The member's snapshot lies in its own memory and, verified, in its holder's."""

    member: MemberId
    epoch: Epoch
    iteration: Iteration


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """The member's trainer has nothing left to do."""

    member: MemberId
    epoch: Epoch


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Failed:
    """The member's trainer raised an error that no membership change explains."""

    member: MemberId
    reason: str
    exit_code: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DeadlinePassed:
    """The time that a `SetDeadline` gave is over."""

    epoch: Epoch
    phase: Phase


Event = (
    Joined | Lost | Aborted | Ready | RegroupFailed | Staged | Finished | Failed | DeadlinePassed
)

# Actions


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SendAbort:
    """Tell `members` to leave their collectives for `epoch`. `store_member` opens a store."""

    members: tuple[MemberId, ...]
    epoch: Epoch
    store_member: MemberId


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SendPlan:
    members: tuple[MemberId, ...]
    plan: Plan


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SendResume:
    """Everybody is ready: train."""

    members: tuple[MemberId, ...]
    epoch: Epoch


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SendCommitted:
    """`iteration` is staged on every slot."""

    members: tuple[MemberId, ...]
    epoch: Epoch
    iteration: Iteration


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SendEnd:
    """The job is over: end with `exit_code`. `reason` is empty when training completed."""

    members: tuple[MemberId, ...]
    exit_code: int
    reason: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Fence:
    """The node is out of the job: make sure that nothing of it runs on."""

    node: Node
    reason: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SetDeadline:
    epoch: Epoch
    phase: Phase


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class EnterPhase:
    """For the log and the clock: the leader is in `phase` now."""

    epoch: Epoch
    phase: Phase


Action = (
    SendAbort | SendPlan | SendResume | SendCommitted | SendEnd | Fence | SetDeadline | EnterPhase
)


class Leader:
    """Membership and recovery of one job.

    grid: the parallel sizes. num_spare_nodes: complete nodes beyond the grid at launch.
    """

    def __init__(self, *, grid: Grid, num_spare_nodes: int) -> None:
        self._grid = grid
        self._holders = choose_holders(grid)
        self._num_expected = grid.world_size + num_spare_nodes * grid.ranks_per_node
        self.phase = Phase.FORMING
        self.epoch = Epoch(0)
        self.members: dict[MemberId, Member] = {}
        self.slots: dict[Slot, MemberId] = {}
        """Which member holds each slot; a slot of a lost node is absent until it is given anew."""
        self.nodes_lost: list[Node] = []
        """Lost since the job last trained, in the order of the news."""
        self.committed: Iteration | None = None
        self.plan: Plan | None = None
        self._state_of: set[Slot] = set()
        """Slots whose member has had the state of some plan: survivors of it."""
        self._aborted: dict[MemberId, Aborted] = {}
        self._ready: set[MemberId] = set()
        self._finished: set[MemberId] = set()
        self._staged: dict[Slot, Iteration] = {}
        self._committed_in_epoch: Iteration | None = None
        self._num_failed_regroups = 0

    # Queries

    @property
    def spare_nodes(self) -> list[Node]:
        """Nodes without slots, complete or not."""
        return sorted(self._spares())

    def slot_of(self, member: MemberId) -> Slot | None:
        return next((slot for slot, holder in self.slots.items() if holder == member), None)

    @property
    def is_over(self) -> bool:
        return self.phase in (Phase.COMPLETED, Phase.HALTED)

    # Events

    def handle(self, event: Event) -> list[Action]:
        """Take one event, return what to do. AssertionError: a pair that cannot be."""
        if self.is_over:
            return self._late(event)
        try:
            handler = _TABLE[self.phase][type(event)]
        except KeyError:
            raise AssertionError(
                f"{type(event).__name__} in phase {self.phase.value} of epoch {self.epoch}"
            ) from None
        return handler(self, event)

    def end(self, exit_code: int, reason: str) -> list[Action]:
        """The job is ended from outside."""
        return [] if self.is_over else self._halt(reason, exit_code)

    def forget_losses(self) -> None:
        """The last swap is complete and reported; the next loss begins a new list."""
        self.nodes_lost.clear()

    def _late(self, event: Event) -> list[Action]:
        """After the end: whoever still comes is sent home."""
        if isinstance(event, Joined):
            return [SendEnd(members=(event.member.member,), exit_code=0, reason="the job is over")]
        return []

    def _ignore(self, event: Event) -> list[Action]:
        return []

    def _join_forming(self, event: Joined) -> list[Action]:
        self.members[event.member.member] = event.member
        if len(self.members) < self._num_expected:
            return []
        nodes: dict[Node, list[Member]] = {}
        for member in self.members.values():
            nodes.setdefault(member.node, []).append(member)
        for position, node in enumerate(sorted(nodes)[: self._grid.num_nodes]):
            self._give_slots(position, nodes[node])
        return self._announce()

    def _join_running(self, event: Joined) -> list[Action]:
        self.members[event.member.member] = event.member
        return []

    def _lost_forming(self, event: Lost) -> list[Action]:
        member = self.members.pop(event.member, None)
        where = f"node {member.node}" if member else "a node"
        return self._halt(f"{where} was lost before the job had formed: {event.reason}", 1)

    def _lost(self, event: Lost) -> list[Action]:
        """The whole node goes with the member. Without slots: forgotten. With slots: an epoch."""
        member = self.members.get(event.member)
        if member is None:
            return []
        node = member.node
        gone = [m.member for m in self.members.values() if m.node == node]
        for member_id in gone:
            del self.members[member_id]
        had_slots = [slot for slot, holder in self.slots.items() if holder in gone]
        for slot in had_slots:
            del self.slots[slot]
            self._state_of.discard(slot)
        fence: list[Action] = [Fence(node=node, reason=event.reason)]
        if not had_slots:
            return fence
        self.nodes_lost.append(node)
        if self.committed is None:
            return fence + self._halt(
                f"node {node} was lost before the first snapshot was complete: {event.reason}", 1
            )
        return fence + self._fill_and_announce()

    def _fill_and_announce(self) -> list[Action]:
        missing = {
            node_position(self._grid, Slot(slot))
            for slot in range(self._grid.world_size)
            if Slot(slot) not in self.slots
        }
        for position in sorted(missing):
            spares = self._spares()
            node = choose_spare(spares, self._grid.ranks_per_node)
            if node is None:
                lost = ", ".join(str(n) for n in self.nodes_lost)
                return self._halt(
                    f"node {lost} was lost and no complete spare node is left; start the job "
                    "again with more --spare-nodes",
                    3,
                )
            self._give_slots(position, spares[node])
        return self._announce()

    def _spares(self) -> dict[Node, list[Member]]:
        busy = set(self.slots.values())
        spares: dict[Node, list[Member]] = {}
        for member in self.members.values():
            if member.member not in busy:
                spares.setdefault(member.node, []).append(member)
        return spares

    def _give_slots(self, position: int, members: list[Member]) -> None:
        first = position * self._grid.ranks_per_node
        for offset, member in enumerate(sorted(members, key=lambda m: m.local_rank)):
            self.slots[Slot(first + offset)] = member.member

    def _announce(self) -> list[Action]:
        """A new epoch: everybody with a slot stands still and says what it holds."""
        self.epoch = Epoch(self.epoch + 1)
        self.phase = Phase.ABORTING
        self._aborted.clear()
        self._ready.clear()
        self._finished.clear()
        return [
            EnterPhase(epoch=self.epoch, phase=self.phase),
            SendAbort(
                members=self._slot_members(),
                epoch=self.epoch,
                store_member=self.slots[self._store_slot()],
            ),
            SetDeadline(epoch=self.epoch, phase=self.phase),
        ]

    def _store_slot(self) -> Slot:
        """The lowest slot that has the state; in the first epoch, slot 0."""
        return min(self._state_of, default=Slot(0))

    def _slot_members(self) -> tuple[MemberId, ...]:
        return tuple(self.slots[slot] for slot in sorted(self.slots))

    def _take_aborted(self, event: Aborted) -> list[Action]:
        if event.epoch != self.epoch or event.member not in self.slots.values():
            return []
        self._aborted[event.member] = event
        if len(self._aborted) < self._grid.world_size:
            return []
        return self._send_plan()

    def _send_plan(self) -> list[Action]:
        restore: Iteration | None = None
        sources: dict[Slot, MemberId] = {}
        if self.committed is not None:
            holdings = {member: ack.holdings for member, ack in self._aborted.items()}
            point = choose_restore_point(sorted(self.slots.items()), holdings)
            if point is None:
                lost = ", ".join(str(n) for n in self.nodes_lost)
                return self._halt(
                    f"after the loss of node {lost} no iteration is left that every slot can be "
                    "restored to from memory; resume from the last checkpoint with --load",
                    4,
                )
            restore, sources = point
        store_slot = self._store_slot()
        store_port = self._aborted[self.slots[store_slot]].store_port
        self.plan = Plan(
            epoch=self.epoch,
            slots=tuple(self.members[member] for member in self._slot_members()),
            replaced=tuple(slot for slot in sorted(self.slots) if slot not in self._state_of),
            restore=restore,
            sources=tuple(sorted(sources.items())),
            holders=self._holders,
            store_slot=store_slot,
            store_port=store_port,
        )
        self._staged.clear()
        self._committed_in_epoch = None
        self.phase = Phase.REGROUPING
        return [
            EnterPhase(epoch=self.epoch, phase=self.phase),
            SendPlan(members=self._slot_members(), plan=self.plan),
            SetDeadline(epoch=self.epoch, phase=self.phase),
        ]

    def _take_ready(self, event: Ready) -> list[Action]:
        if event.epoch != self.epoch:
            return []
        self._ready.add(event.member)
        if len(self._ready) < self._grid.world_size:
            return []
        self.phase = Phase.TRAINING
        self._num_failed_regroups = 0
        self._state_of = set(self.slots)
        return [
            EnterPhase(epoch=self.epoch, phase=self.phase),
            SendResume(members=self._slot_members(), epoch=self.epoch),
        ]

    def _regroup_failed(self, event: RegroupFailed) -> list[Action]:
        if event.epoch != self.epoch:
            return []
        self._num_failed_regroups += 1
        if self._num_failed_regroups > MAX_FAILED_REGROUPS:
            return self._halt(
                f"process groups could not be rebuilt in {MAX_FAILED_REGROUPS} attempts although "
                f"no node is lost: {event.reason}",
                5,
            )
        return self._announce()

    def _take_staged(self, event: Staged) -> list[Action]:
        slot = self.slot_of(event.member)
        if event.epoch != self.epoch or slot is None:
            return []
        self._staged[slot] = max(event.iteration, self._staged.get(slot, event.iteration))
        if len(self._staged) < self._grid.world_size:
            return []
        complete = min(self._staged.values())
        if self._committed_in_epoch is not None and complete <= self._committed_in_epoch:
            return []
        self._committed_in_epoch = self.committed = complete
        return [SendCommitted(members=self._slot_members(), epoch=self.epoch, iteration=complete)]

    def _take_finished(self, event: Finished) -> list[Action]:
        if event.epoch != self.epoch:
            return []
        self._finished.add(event.member)
        if len(self._finished) < self._grid.world_size:
            return []
        self.phase = Phase.COMPLETED
        return [
            EnterPhase(epoch=self.epoch, phase=self.phase),
            SendEnd(members=tuple(sorted(self.members)), exit_code=0, reason=""),
        ]

    def _failed(self, event: Failed) -> list[Action]:
        member = self.members.get(event.member)
        if member is None:
            return []
        return self._halt(f"node {member.node}: {event.reason}", event.exit_code)

    def _forming_late(self, event: DeadlinePassed) -> list[Action]:
        return self._halt(
            f"only {len(self.members)} of {self._num_expected} guardians came in time", 5
        )

    def _deadline(self, event: DeadlinePassed) -> list[Action]:
        if (event.epoch, event.phase) != (self.epoch, self.phase):
            return []
        waiting = self._aborted if self.phase is Phase.ABORTING else self._ready
        late = [slot for slot, member in sorted(self.slots.items()) if member not in waiting]
        return self._halt(
            f"epoch {self.epoch} did not get past {self.phase.value} in time; no answer from "
            f"slots {', '.join(map(str, late))}",
            5,
        )

    def _halt(self, reason: str, exit_code: int) -> list[Action]:
        self.phase = Phase.HALTED
        return [
            EnterPhase(epoch=self.epoch, phase=self.phase),
            SendEnd(members=tuple(sorted(self.members)), exit_code=exit_code, reason=reason),
        ]


_Handler = Callable[[Leader, Any], list[Action]]

_WHILE_RUNNING: dict[type, _Handler] = {
    Joined: Leader._join_running,
    Lost: Leader._lost,
    Failed: Leader._failed,
    # Of a phase or an epoch that has passed, unless a phase below says otherwise.
    Staged: Leader._ignore,
    Aborted: Leader._ignore,
    Ready: Leader._ignore,
    RegroupFailed: Leader._ignore,
    Finished: Leader._ignore,
    DeadlinePassed: Leader._ignore,
}

_TABLE: dict[Phase, dict[type, _Handler]] = {
    Phase.FORMING: {
        Joined: Leader._join_forming,
        Lost: Leader._lost_forming,
        Failed: Leader._failed,
        DeadlinePassed: Leader._forming_late,
    },
    Phase.ABORTING: {
        **_WHILE_RUNNING,
        Aborted: Leader._take_aborted,
        DeadlinePassed: Leader._deadline,
    },
    Phase.REGROUPING: {
        **_WHILE_RUNNING,
        Ready: Leader._take_ready,
        Staged: Leader._take_staged,
        RegroupFailed: Leader._regroup_failed,
        DeadlinePassed: Leader._deadline,
    },
    Phase.TRAINING: {
        **_WHILE_RUNNING,
        Staged: Leader._take_staged,
        Finished: Leader._take_finished,
    },
}
"""What is done with each event in each phase. COMPLETED and HALTED take none: see `_late`."""
