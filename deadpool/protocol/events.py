"""What a guardian's core is told, and what it asks for. No clock, no socket, no thread.

Whoever runs a core feeds every event through `Guardian.handle`, one at a time, and carries out the
actions that come back, in order.
"""

from __future__ import annotations

import dataclasses

from deadpool.protocol.messages import Downstream, Upstream
from deadpool.protocol.types import (
    End,
    Epoch,
    Iteration,
    Member,
    MemberId,
    Node,
    Phase,
    Plan,
    Slot,
)

# Events of connections and time


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Started:
    """The trainer is up. `forms_job`: this guardian leads the launch; one of the job does."""

    forms_job: bool


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Contact:
    """Answers `FindContact`: some member of the job was reached."""

    member: Member


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class FromFollower:
    """A message on a connection that `sender` dialled."""

    sender: MemberId
    message: Upstream


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class FollowerGone:
    """The connection that `sender` had dialled ended."""

    sender: MemberId
    reason: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class FromLeader:
    """A message on the connection that this guardian dialled to `sender`."""

    sender: MemberId
    message: Downstream


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LeaderGone:
    """The connection dialled to `sender` ended, or could not be made."""

    sender: MemberId
    reason: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Dead:
    """Answers `Probe`: the member's process is gone for certain."""

    member: MemberId


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Tick:
    """One heartbeat interval has passed. After a pause of the whole process there is one, not
    many: its own pause must not look like everybody's silence."""


# Events of the trainer and of asks from outside


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TrainerAborted:
    """The trainer stands outside every collective of epochs before `epoch`."""

    epoch: Epoch
    store_port: int
    own: frozenset[Iteration]
    """Whole snapshots of its slot in this node's memory."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TrainerSaid:
    """Ready, RegroupFailed, FirstStep, Finished or Failed, for the leader."""

    message: Upstream


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TrainerDied:
    """The trainer process ended."""

    signal: str | None
    """The name of the one that ended it; None where it chose to end."""
    exit_code: int
    can_respawn: bool
    """Another can be started."""
    reason: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TrainerStalled:
    """The trainer has made no progress for as long as it is given. Said again as long as that
    lasts, once in each such time."""

    iteration: Iteration
    """That it is in."""
    reason: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class EndAsked:
    """End the job: a signal, or an error of this guardian."""

    exit_code: int
    reason: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DrainAsked:
    """Have training saved and finished."""


# Events of snapshots


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Captured:
    """A buffer of this node's memory holds the whole snapshot of `iteration`."""

    epoch: Epoch
    iteration: Iteration


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PutDone:
    """The holder has the replica, verified."""

    epoch: Epoch
    iteration: Iteration


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class FetchFailed:
    """The source answered and cannot give what the plan says it has."""

    epoch: Epoch
    reason: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Offered:
    """An owner offers a replica. Answered by `AnswerOffer`."""

    slot: Slot
    epoch: Epoch
    iteration: Iteration
    num_bytes: int
    checksum: int | None
    """None where the owner has not read the bytes yet: then they are wanted."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Received:
    """The bytes of an offer have come into `buffer`. Answered by `AnswerOffer`."""

    slot: Slot
    epoch: Epoch
    iteration: Iteration
    buffer: int
    num_bytes: int
    checksum: int
    """As computed from the bytes."""
    announced: int
    """As the owner computed it."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A member wants the replica of `slot`. Answered by `AnswerPull`."""

    slot: Slot
    epoch: Epoch
    iteration: Iteration


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Damaged:
    """A snapshot in this node's memory, of its own slot or a replica, is not what it was. It is
    never used again. Own snapshots are left out of `TrainerAborted.own` by who says this."""

    slot: Slot
    iteration: Iteration
    reason: str


Event = (
    Started | Contact | FromFollower | FollowerGone | FromLeader | LeaderGone | Dead | Tick
    | TrainerAborted | TrainerSaid | TrainerDied | TrainerStalled | EndAsked | DrainAsked
    | Captured | PutDone | FetchFailed | Offered | Received | Asked | Damaged
)  # fmt: skip

# Actions


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ToFollowers:
    """On the connections that these members dialled; lost where there is none."""

    members: tuple[MemberId, ...]
    message: Downstream


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ToLeader:
    """On the connection to `leader`, dialled if need be; one to anybody else is closed in
    silence. LeaderGone when it ends or cannot be made."""

    leader: Member
    message: Upstream


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class HangUp:
    """Close the connections that these members dialled, after what was sent; no FollowerGone."""

    members: tuple[MemberId, ...]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class FindContact:
    """Look for a member of the job. Answered by Contact, however long it takes."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """Is the member's process there? Answered by Dead if its host says no."""

    member: Member


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SpawnTrainer:
    """In the place of the one that died."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class KillTrainer:
    """It hangs. TrainerDied follows."""

    reason: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DrainTrainer:
    """SIGTERM to the trainer: save and finish."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AbortTrainer:
    """Announce `epoch` to the trainer. Answered by TrainerAborted. Transfers of older epochs are
    cancelled."""

    epoch: Epoch
    opens_store: bool


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CancelTransfers:
    """An epoch has ended; what moved in it stops."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AdoptPlan:
    """Forget own snapshots past `plan.restart.restore`, fetch this slot's where the plan names a
    source, tell the trainer."""

    plan: Plan
    slot: Slot
    source: Member | None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ResumeTrainer:
    epoch: Epoch


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TellCommitted:
    """To the trainer."""

    epoch: Epoch
    iteration: Iteration


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Put:
    """Bring the snapshot of `iteration` to all holders, to each after earlier puts; tried again
    until PutDone (all have it) or CancelTransfers."""

    epoch: Epoch
    iteration: Iteration
    slot: Slot
    holders: tuple[Member, ...]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AnswerOffer:
    """buffer: receive into it. refusal: why not; empty and no buffer: it is here, verified."""

    buffer: int | None
    refusal: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AnswerPull:
    """buffer: send it. refusal: why not."""

    buffer: int | None
    refusal: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class KeepSnapshots:
    """Write the snapshots of `iteration` that are here, of these slots, where they outlive the job.
    It is over before this guardian ends."""

    iteration: Iteration
    slots: tuple[Slot, ...]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Lacks:
    """For a person: `nodes_lost` cannot be replaced until a node joins, for which the job waits."""

    nodes_lost: tuple[Node, ...]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StopTrainer:
    """The job has ended so. The trainer ends by itself after exit code 0, at once otherwise."""

    end: End


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Exit:
    """This guardian's part is over, once its trainer is gone. The last action."""

    exit_code: int
    reason: str
    """Empty where somebody else says why."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class EnterPhase:
    """For the log and the clock: the job, which this guardian leads, is in `phase` now."""

    epoch: Epoch
    phase: Phase
    nodes_lost: tuple[Node, ...]
    """Since it last trained."""
    spares_used: tuple[Node, ...] = ()
    """Nodes that the plan gives slots to."""
    restore: Iteration | None = None
    respawned: tuple[tuple[Node, str], ...] = ()
    """Nodes on which a trainer was started anew since the job last trained, and why."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Observe:
    """For the report: the leader has taken this message of a member on `node`."""

    node: Node
    message: Upstream


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SuspectCorruption:
    """For a person: `node` first saw a non-finite value in `iteration`; run again on the same data,
    the iteration had none."""

    node: Node
    iteration: Iteration
    reason: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RosterInstalled:
    """For those who come later: this guardian leads these members."""

    members: tuple[Member, ...]


Action = (
    ToFollowers | ToLeader | HangUp | FindContact | Probe | SpawnTrainer | KillTrainer
    | DrainTrainer | AbortTrainer | CancelTransfers | AdoptPlan | ResumeTrainer | TellCommitted
    | Put | AnswerOffer | AnswerPull | KeepSnapshots | Lacks | StopTrainer | Exit | EnterPhase
    | Observe | SuspectCorruption | RosterInstalled
)  # fmt: skip
