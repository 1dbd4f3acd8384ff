"""Names of the protocol. One meaning each, distinct types, so that a checker sees a mix-up."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Collection, Iterable
from typing import NamedTuple, NewType

Slot = NewType("Slot", int)
"""A logical place in Megatron's grid, equal to the torch rank. Never renumbered."""

Node = NewType("Node", int)
"""What dies together: the failure domain. The launcher's index of it."""

Epoch = NewType("Epoch", int)
"""Membership version. In every message; a message of another epoch has no effect."""

Iteration = NewType("Iteration", int)
"""Training counter: the number of completed optimizer steps."""

MemberId = NewType("MemberId", int)
"""One guardian's life in the job, drawn at random by itself. A node that returns has new ones."""


class ProtocolError(AssertionError):
    """A peer has said what no guardian with this code says there. For whoever runs a core, a reason
    to hang up on that peer; for a search or a simulation, a bug."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """Who a guardian is and where it is reached."""

    member: MemberId
    node: Node
    local_rank: int
    host: str
    """Address at which other guardians and trainers reach this one."""
    control_port: int
    """TCP port at which it takes the protocol's messages."""
    data_port: int
    """TCP port at which it takes and gives replicas."""


class RosterId(NamedTuple):
    """Orders rosters: a later epoch's after all of an earlier one's."""

    epoch: Epoch
    version: int
    """0 comes with the epoch's plan; each change of spares while it trains adds one."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Roster:
    """Who belongs to the job. A majority of it decides about the next one."""

    id: RosterId
    members: tuple[Member, ...]
    """In the order of succession; the first proposed it and leads."""
    slots: tuple[MemberId, ...]
    """Indexed by slot. Members that are not in it are spares."""

    def is_quorum(self, voters: Collection[MemberId]) -> bool:
        """More than half, or half with the first: no two quorums are disjoint."""
        if 2 * len(voters) < len(self.members):
            return False  # For speed: asked once a vote, it may not look at every member.
        votes = sum(member.member in voters for member in self.members)
        if 2 * votes == len(self.members):
            return self.members[0].member in voters
        return 2 * votes > len(self.members)

    def find(self, member: MemberId) -> Member | None:
        return next((m for m in self.members if m.member == member), None)


def succession(leader: Member, members: Iterable[Member]) -> tuple[Member, ...]:
    """The order in which members lead: the leader, then the others as they are."""
    return (leader, *(m for m in members if m.member != leader.member))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Holdings:
    """What one guardian's memory can restore, read when its trainer stands still."""

    own: frozenset[Iteration]
    """Snapshots of its own slot."""
    replicas: frozenset[tuple[Slot, Iteration]]
    """Snapshots it keeps for others, checksum verified on receipt."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Restart:
    """The state that an epoch starts from; what a plan says beside its roster."""

    restore: Iteration | None
    """The iteration that everybody starts from; None in the first epoch, where each trainer
    initialises itself or loads a checkpoint."""
    replaced: tuple[Slot, ...]
    """Slots whose member does not hold the state yet: it is brought from `sources`."""
    sources: tuple[tuple[Slot, MemberId], ...]
    """For each slot that must be brought, the member whose memory holds its snapshot."""
    store_slot: Slot
    """Its trainer hosts the rendezvous store of this epoch."""
    store_port: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Who is who in an epoch, and the state it starts from. The same on every member."""

    epoch: Epoch
    slots: tuple[Member, ...]
    """Indexed by slot."""
    holders: tuple[tuple[Slot, ...], ...]
    """Indexed by slot: the slots whose members hold this slot's replicas, the nearest first."""
    restart: Restart

    def member_of(self, member: MemberId) -> Member:
        return next(m for m in self.slots if m.member == member)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class End:
    """How the job ends. `reason` is empty when training completed."""

    epoch: Epoch
    """Of the leader that said so."""
    exit_code: int
    reason: str
    keep: Iteration | None = None
    """Members write what they hold of this iteration to persistent storage before they leave."""
    orphans: tuple[Slot, ...] = ()
    """Slots whose own node is lost: their replicas are written."""


class Phase(enum.Enum):
    """Where the job is, as its leader sees it."""

    FORMING = "forming"
    """Waiting for every member of the launch to join."""
    ABORTING = "aborting"
    """An epoch was announced; members leave their collectives and say what they hold."""
    REGROUPING = "regrouping"
    """A plan was sent; members accept it, build groups, restore and verify."""
    TRAINING = "training"
    """Every slot trains."""
    ENDING = "ending"
    """Members were told the end and note it; then all leave."""


class Standing(enum.Enum):
    """Where one guardian is, as it sees itself."""

    JOINING = "joining"
    """Looks for the leader of a job, or waits for its welcome."""
    FOLLOWING = "following"
    """Has a leader."""
    SEEKING = "seeking"
    """Lost its leader: supports one successor after the other, itself in its turn."""
    LEFT = "left"
    """Its part is over. Final."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """Every wait of the protocol, in ticks; a guardian's clock ticks once a heartbeat interval."""

    silence: int
    """Without a heartbeat for so long, a member is lost, or a leader."""
    seek: int
    """How long a successor is given to announce an epoch."""
    minority: int
    """How long a guardian seeks a leader before it ends."""
    start: int
    """Forming, and each phase before the first commit."""
    recovery: int
    """Each phase of a recovery."""
    leave: int
    """How long the end waits for members to note it."""
    lack: int = 0
    """How long a job that lacks a spare node waits for one to join."""


NON_FINITE = "non-finite"
"""Kind of fault: a loss or gradient that is NaN or infinite."""

STALLED = "stalled"
"""Kind of fault: a trainer makes no progress; perhaps it waits for another."""

HUNG = "hung"
"""Kind of crash: a trainer that did not leave what it was in when an epoch was announced to it, and
was killed for that."""

EXIT_FAILED = 1
EXIT_SPARES_EXHAUSTED = 3
EXIT_NO_CONSISTENT_STATE = 4
EXIT_DEADLINE = 5
EXIT_MINORITY = 6
EXIT_NO_JOB = 70
"""A guardian found no job to join."""
EXIT_FENCED = 72
"""A guardian whose node counts as lost."""
EXIT_GUARDIAN_FAILED = 73
"""An error of ours ended a guardian; the job goes on without its node."""
