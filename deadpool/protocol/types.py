"""Names of the protocol. One meaning each, distinct types, so that a checker sees a mix-up."""

from __future__ import annotations

import dataclasses
import enum
from typing import NewType

Slot = NewType("Slot", int)
"""A logical place in Megatron's grid, equal to the torch rank. Never renumbered."""

Node = NewType("Node", int)
"""What dies together: the failure domain. The launcher's index of it."""

Epoch = NewType("Epoch", int)
"""Membership version. In every message; a message of another epoch has no effect."""

Iteration = NewType("Iteration", int)
"""Training counter: the number of completed optimizer steps."""

MemberId = NewType("MemberId", int)
"""One guardian's life in the job. A node that returns gets new ones."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """A guardian that said hello."""

    member: MemberId
    node: Node
    local_rank: int
    host: str
    """Address at which other guardians and trainers reach this one."""
    data_port: int
    """TCP port at which it takes and gives replicas."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Holdings:
    """What one guardian's memory can restore, read when its trainer stands still."""

    own: frozenset[Iteration]
    """Snapshots of its own slot."""
    replicas: frozenset[tuple[Slot, Iteration]]
    """Snapshots it keeps for others, checksum verified on receipt."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Who is who in an epoch, and the state it starts from. The same object on every member."""

    epoch: Epoch
    slots: tuple[Member, ...]
    """Indexed by slot."""
    replaced: tuple[Slot, ...]
    """Slots whose member does not hold the state yet: it is brought from `sources`."""
    restore: Iteration | None
    """The iteration that everybody starts from; None in the first epoch, where each trainer
    initialises itself or loads a checkpoint."""
    sources: tuple[tuple[Slot, MemberId], ...]
    """For each replaced slot, the member whose memory holds its snapshot of `restore`."""
    holders: tuple[Slot, ...]
    """Indexed by slot: the slot whose member holds this slot's replica."""
    store_slot: Slot
    """Its trainer hosts the rendezvous store of this epoch."""
    store_port: int


class Phase(enum.Enum):
    """Where the job is, as its leader sees it."""

    FORMING = "forming"
    """Waiting for every member of the launch to say hello."""
    ABORTING = "aborting"
    """An epoch was announced; members leave their collectives and say what they hold."""
    REGROUPING = "regrouping"
    """A plan was sent; members build groups, restore and verify."""
    TRAINING = "training"
    """Every slot trains."""
    COMPLETED = "completed"
    """Every slot has finished. Final."""
    HALTED = "halted"
    """The job ended without finishing; the cause is named. Final."""
