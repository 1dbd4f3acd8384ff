"""What guardians tell each other. Plain data; `deadpool.messages` puts it on the wire.

A follower dials the guardian that it takes for the leader; `Upstream` messages travel that way,
`Downstream` ones come back on the same connection. Each has an epoch where its meaning depends on
one, and has no effect in another.
"""

from __future__ import annotations

import dataclasses

from deadpool.protocol.types import (
    End,
    Epoch,
    Holdings,
    Iteration,
    Member,
    MemberId,
    Restart,
    Roster,
    RosterId,
    Slot,
)

# Upstream


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Join:
    """Take me into the job: at its launch, or any time later, as a spare."""

    member: Member


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Support:
    """My leader is lost: lead. Says what this member knows, so that a leader learns of any roster
    that may be in force."""

    member: Member
    promised: Epoch
    """The newest epoch it has entered: only a later one has its promise."""
    end: End | None
    """The end of the job, if it was told."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Aborted:
    """This member has entered the epoch: it takes nothing from an older one's leader any more,
    and its trainer stands outside every collective."""

    epoch: Epoch
    store_port: int
    """Of a fresh rendezvous store in its trainer; 0 where none was asked for."""
    holdings: Holdings
    slot: Slot | None
    """The slot that its trainer was built for; None for one that can take any."""
    has_state: bool
    """Its trainer has trained in that slot."""
    committed: Iteration | None
    """The newest commit it has heard of."""
    installed: RosterId | None
    """The newest roster it knows to be in force."""
    accepted: RosterId | None
    """The newest roster it has accepted; it may be in force."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RosterIs:
    """Answers `RosterWanted`: one for each roster that may be in force, the newest last."""

    epoch: Epoch
    roster: Roster


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Accepted:
    """This member keeps the proposed roster; no leader that it follows will go past it."""

    roster: RosterId


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Ready:
    """The member's groups are built, its state restored and compared with its peers'.

    seconds by stage, num_bytes brought from other nodes, iterations to run again.
    """

    epoch: Epoch
    seconds: dict[str, float]
    num_bytes: int
    iterations_rerun: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RegroupFailed:
    """Groups could not be built although no member is known to be lost."""

    epoch: Epoch
    reason: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Staged:
    """The member's snapshot lies in its own memory and, verified, in its holder's."""

    epoch: Epoch
    iteration: Iteration


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class FirstStep:
    """The first iteration after a recovery is complete."""

    epoch: Epoch
    iteration: Iteration
    seconds: float


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """The member's trainer has nothing left to do."""

    epoch: Epoch


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Faltered:
    """The member's trainer raised an error, lives, and waits to be taken back to the last snapshot.

    iteration: that it was in. kind: what a second error of the same cause would share.
    """

    epoch: Epoch
    iteration: Iteration
    kind: str
    reason: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Failed:
    """The member's trainer raised an error that nothing can mend."""

    reason: str
    exit_code: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TrainerCrashed:
    """The trainer process ended by a signal; a new one takes its place, and restores the slot from
    this member's memory."""

    epoch: Epoch
    kind: str
    """The signal's name."""
    reason: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TrainerLost:
    """The trainer process ended by a signal, and is not started anew: its node counts as lost."""

    reason: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class EndWanted:
    """Somebody asked this member to end the job."""

    exit_code: int
    reason: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DrainWanted:
    """Somebody asked this member to have training saved and finished."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class EndNoted:
    """The member knows the end and would tell it to a successor of the leader."""


# Downstream


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Welcome:
    """You are known, and will be in the next roster."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class NotLeader:
    """Join there. None: nobody leads at the moment; ask again."""

    leader: Member | None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Abort:
    """Enter this epoch. The trainer of `store_member` opens a rendezvous store."""

    epoch: Epoch
    store_member: MemberId


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RosterWanted:
    """Send the newest roster that you have accepted, and those before it that may be in force."""

    epoch: Epoch


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Propose:
    """Accept this roster; with `restart` it is the epoch's plan.

    base: the roster that `added`, `removed` and `slots` are differences to; None for a whole one.
    The order is the leader's, then the base's without `removed`, then `added`.
    """

    id: RosterId
    leader: MemberId
    base: RosterId | None
    added: tuple[Member, ...]
    removed: tuple[MemberId, ...]
    slots: tuple[tuple[Slot, MemberId], ...]
    restart: Restart | None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Resume:
    """Everybody is ready, and the epoch's roster is in force: train."""

    epoch: Epoch


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Install:
    """The roster is in force."""

    roster: RosterId


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Committed:
    """`iteration` is staged on every slot."""

    epoch: Epoch
    iteration: Iteration


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Drain:
    """The job was asked to end: have the trainer save and finish."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """Note the end, stop the trainer, and wait for `Leave`."""

    end: End


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Leave:
    """Everybody has noted the end."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Fenced:
    """The job goes on without this member's node."""

    reason: str


# Both ways


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Heartbeat:
    """Alive."""


Upstream = (
    Join | Support | Aborted | RosterIs | Accepted | Ready | RegroupFailed | Staged | FirstStep
    | Finished | Faltered | Failed | TrainerCrashed | TrainerLost | EndWanted | DrainWanted
    | EndNoted | Heartbeat
)  # fmt: skip

Downstream = (
    Welcome | NotLeader | Abort | RosterWanted | Propose | Resume | Install | Committed | Drain
    | Ended | Leave | Fenced | Heartbeat
)  # fmt: skip
