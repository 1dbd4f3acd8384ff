"""What must hold in every execution, as predicates over plans, memories and a short history.

Shared by the search, the simulation and the check of traces of real runs. Nothing here runs in a
job. The numbers are those of the architecture's invariants.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Set

from deadpool.protocol.types import (
    EXIT_DEADLINE,
    EXIT_FAILED,
    EXIT_FENCED,
    EXIT_MINORITY,
    EXIT_NO_CONSISTENT_STATE,
    EXIT_NO_JOB,
    EXIT_SPARES_EXHAUSTED,
    Epoch,
    Holdings,
    Iteration,
    MemberId,
    Node,
    Plan,
    Roster,
    RosterId,
)

DOCUMENTED_ENDS = frozenset(
    {
        0,
        EXIT_FAILED,
        EXIT_SPARES_EXHAUSTED,
        EXIT_NO_CONSISTENT_STATE,
        EXIT_DEADLINE,
        EXIT_MINORITY,
        EXIT_NO_JOB,
        EXIT_FENCED,
    }
)
OUTSIDE = frozenset({EXIT_FENCED, EXIT_NO_JOB, EXIT_MINORITY})
"""Exit codes of guardians that the job goes on without."""


class Violated(Exception):
    """An invariant does not hold."""


def require(holds: bool, broken: str) -> None:
    if not holds:
        raise Violated(broken)


# 1: shard completeness


def nodes_with(
    iteration: Iteration, plan: Plan, memories: Mapping[MemberId, Holdings]
) -> list[Set[Node]]:
    """For each slot of the plan, the nodes that hold `iteration` of it."""
    kept_on: list[set[Node]] = [set() for _ in plan.slots]
    for slot, member in enumerate(plan.slots):
        holdings = memories[member.member]
        if iteration in holdings.own:
            kept_on[slot].add(member.node)
        for other, kept in holdings.replicas:
            if kept == iteration:
                kept_on[other].add(member.node)
    return [frozenset(nodes) for nodes in kept_on]


def check_completeness(
    plan: Plan, committed: Iteration, highest: Iteration, memories: Mapping[MemberId, Holdings]
) -> None:
    """While all slots live: whichever nodes are lost next, as many as there are replicas, an
    iteration from `committed` on can be restored everywhere.

    committed: in the plan's epoch. highest: the newest that any slot has completed.
    """
    places = [nodes_with(Iteration(i), plan, memories) for i in range(committed, highest + 1)]
    nodes = sorted({member.node for member in plan.slots})
    for lost in itertools.combinations(nodes, len(plan.holders[0])):
        if not any(all(kept - set(lost) for kept in place) for place in places):
            raise Violated(
                f"1: {committed} is committed in epoch {plan.epoch}, and without the nodes "
                f"{list(lost)} no iteration from it on can be restored everywhere"
            )


# 2 and 4: who is who


def check_plan(plan: Plan) -> None:
    members = [member.member for member in plan.slots]
    require(len(set(members)) == len(members), f"2: a member holds two slots: {members}")
    require(
        all(
            len({plan.slots[x].node for x in (slot, *holders)}) == 1 + len(holders)
            for slot, holders in enumerate(plan.holders)
        ),
        f"1: two copies of a slot lie on one node in epoch {plan.epoch}",
    )


# What depends on the past


class History:
    """What an execution has done so far, checked as it goes on. Cheap to copy: see `copy`."""

    __slots__ = (
        "commits", "ends", "exits", "highest", "in_force", "loaded", "plans", "proposers", "ready",
        "restores", "rosters",
    )  # fmt: skip

    def __init__(self) -> None:
        self.rosters: dict[RosterId, Roster] = {}
        self.plans: dict[Epoch, Plan] = {}
        self.in_force: RosterId | None = None
        self.proposers: dict[Epoch, MemberId] = {}
        self.restores: dict[Epoch, Iteration] = {}
        """Of epochs that were resumed."""
        self.loaded: dict[Epoch, tuple[Iteration, int]] = {}
        """The state that an epoch's trainers begin with: iteration, and the epoch it was made in,
        since a repeated iteration may differ in bits."""
        self.ready: dict[Epoch, frozenset[MemberId]] = {}
        self.commits: dict[Epoch, Iteration] = {}
        self.highest = Iteration(-1)
        self.ends: dict[Epoch, int] = {}
        self.exits: dict[MemberId, int] = {}

    def copy(self) -> History:
        twin = object.__new__(History)
        for name in self.__slots__:
            value = getattr(self, name)
            setattr(twin, name, value.copy() if isinstance(value, dict) else value)
        return twin

    def key(self) -> tuple[object, ...]:
        """What later checks depend on; rosters and plans follow from their names."""
        return (
            self.in_force, tuple(self.plans), tuple(self.proposers.items()),
            tuple(self.restores.items()),
            tuple(self.loaded.items()), tuple(self.commits.items()), self.highest,
            frozenset(self.ready.items()), tuple(self.ends.items()),
            tuple(sorted(self.exits.items())),
        )  # fmt: skip

    def proposed(self, leader: MemberId, roster: Roster) -> None:
        """A leader asks members to accept a roster."""
        known = self.rosters.setdefault(roster.id, roster)
        require(known == roster, f"2: two rosters are called {roster.id}")
        first = self.proposers.setdefault(roster.id.epoch, leader)
        require(first == leader, f"2: {first} and {leader} lead epoch {roster.id.epoch}")

    def accepted(self, roster: Roster) -> None:
        """A member keeps a roster, as it composed it."""
        known = self.rosters.get(roster.id)
        require(known == roster, f"2: roster {roster.id} was composed differently")

    def planned(self, epoch: Epoch, promised_by: Set[MemberId]) -> None:
        """A leader makes a plan. promised_by: members that have entered this epoch, or a later
        one, and so take nothing of an earlier."""
        if self.in_force is not None and self.in_force.epoch < epoch:
            require(
                self.rosters[self.in_force].is_quorum(promised_by),
                f"4: epoch {epoch} is planned without promises of a quorum of {self.in_force}",
            )

    def adopted(self, plan: Plan) -> None:
        """A member with a slot takes a plan."""
        if plan.epoch in self.plans:
            require(self.plans[plan.epoch] == plan, f"2: epoch {plan.epoch} has two plans")
            return
        check_plan(plan)
        roster = self.rosters.get(RosterId(plan.epoch, 0))
        require(
            roster is not None and roster.slots == tuple(m.member for m in plan.slots),
            f"4: no proposed roster gives epoch {plan.epoch} its slots",
        )
        self.plans[plan.epoch] = plan

    def was_loaded(
        self, epoch: Epoch, member: MemberId, iteration: Iteration, made_in: int
    ) -> None:
        """A member's trainer is ready with this state."""
        self.ready[epoch] = self.ready.get(epoch, frozenset()) | {member}
        first = self.loaded.setdefault(epoch, (iteration, made_in))
        require(
            first == (iteration, made_in),
            f"3: epoch {epoch} begins with {first} and {(iteration, made_in)}",
        )
        require(
            self.highest - iteration <= 1,
            f"3: iterations {iteration + 1} to {self.highest} are run again",
        )

    def installed(self, roster: RosterId, accepted_by: Set[MemberId]) -> None:
        """A leader says that a roster is in force. accepted_by: members that keep it."""
        if self.in_force is not None and roster <= self.in_force:
            return
        for name in {roster, self.in_force} - {None}:
            assert name is not None
            require(
                self.rosters[name].is_quorum(accepted_by),
                f"4: {roster} comes into force without a quorum of {name}",
            )
        self.in_force = roster

    def resumed(self, epoch: Epoch, accepted_by: Set[MemberId], gone_on: Set[MemberId]) -> None:
        """A leader lets an epoch train. accepted_by: members that keep its roster. gone_on: members
        that have entered a later epoch."""
        plan = self.plans[epoch]
        newest_epoch = max(self.restores, default=None)
        if newest_epoch is not None and newest_epoch >= epoch:
            # A leader may hear late that all were ready, if not all are there any more: without a
            # slot no iteration is completed.
            require(
                any(member.member in gone_on for member in plan.slots),
                f"3: epoch {epoch} begins to train after {newest_epoch}",
            )
            return
        self.installed(RosterId(epoch, 0), accepted_by)
        late = {member.member for member in plan.slots} - self.ready.get(epoch, frozenset())
        require(not late, f"3: epoch {epoch} trains although {sorted(late)} are not ready")
        restore = plan.restart.restore
        restore = Iteration(0) if restore is None else restore
        newest = max(self.commits.values(), default=restore)
        require(restore >= newest, f"3: epoch {epoch} restarts from {restore} before {newest}")
        self.restores[epoch] = restore

    def committed(self, epoch: Epoch, iteration: Iteration) -> None:
        """A leader announces a commit."""
        for later, restore in self.restores.items():
            require(
                later <= epoch or iteration <= restore,
                f"3: {iteration} is committed in epoch {epoch} although {later} restarted from "
                f"{restore}",
            )
        require(
            iteration > self.commits.get(epoch, -1), f"3: {iteration} is committed out of order"
        )
        self.commits[epoch] = iteration

    def stepped(self, epoch: Epoch, iteration: Iteration) -> None:
        """A trainer has completed `iteration`."""
        for later, restore in self.restores.items():
            require(
                later <= epoch or iteration <= restore + 1,
                f"3: two worlds: epoch {epoch} completes {iteration} and {later} restarted from "
                f"{restore}",
            )
        self.highest = max(self.highest, iteration)

    def ended(self, epoch: Epoch, exit_code: int) -> None:
        """A leader says how the job ends."""
        self.ends[epoch] = exit_code

    def exited(self, member: MemberId, exit_code: int) -> None:
        """A guardian has ended by itself."""
        require(exit_code in DOCUMENTED_ENDS, f"5: exit code {exit_code} of {member}")
        self.exits[member] = exit_code
        inside = {code for code in self.exits.values() if code not in OUTSIDE}
        require(len(inside) <= 1, f"5: surviving members end with {sorted(inside)}")
