"""What travels between processes: typed, size-bounded, MessagePack by msgspec; never pickle.

Guardians tell each other the protocol's messages, which are plain dataclasses and travel as they
are. Beside them, here: the greeting, what trainer and guardian say over their socket pair, and the
headers of replicas. A frame is the length of what follows (4 bytes, little endian), the type (1
byte, the index in `TYPES`), and the fields.
"""

from __future__ import annotations

import dataclasses

import msgspec

from deadpool.protocol.messages import (
    Abort,
    Aborted,
    Accepted,
    Committed,
    Downstream,
    Drain,
    DrainWanted,
    Ended,
    EndNoted,
    EndWanted,
    Failed,
    Faltered,
    Fenced,
    Finished,
    FirstStep,
    Heartbeat,
    Install,
    Join,
    Leave,
    NotLeader,
    Propose,
    Ready,
    RegroupFailed,
    Resume,
    RosterIs,
    RosterWanted,
    Staged,
    Support,
    TrainerCrashed,
    TrainerLost,
    Upstream,
    Welcome,
)
from deadpool.protocol.types import Epoch, Iteration, Member, Plan, Slot

MAX_MESSAGE_BYTES = 64 << 20
"""Type and fields of one message. A plan for 10,000 slots is about 1 MB."""

MAX_HELLO_BYTES = 4 << 10
"""The same, for the first message of a connection."""


class WireError(ConnectionError):
    """The peer is gone or speaks something else; the connection is of no more use."""


# Both ways, first on a connection between guardians


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Hello:
    """Who speaks, once both sides have proved that they are of the job."""

    member: Member


# Trainer to guardian, besides Ready, RegroupFailed, FirstStep, Finished and Failed


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TrainerUp:
    """Everything is imported; a slot may be given."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ArenaLayout:
    """The trainer has given the arena memory its size."""

    payload_bytes: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotWanted:
    """Answered by SnapshotHere once the snapshot lies in the arena."""

    epoch: Epoch
    iteration: Iteration
    is_live: bool
    """The trainer's tensors are those of `iteration`: without a good snapshot it takes one anew."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Captured:
    """Buffer `buffer` holds the whole snapshot of `iteration`."""

    epoch: Epoch
    iteration: Iteration
    buffer: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TrainerAborted:
    """Answers EnterEpoch: the trainer stands outside every collective of earlier epochs.

    store_port: of its fresh rendezvous store; 0 where none was asked for. live: the iteration that
    its tensors hold and it can take a snapshot of.
    """

    epoch: Epoch
    store_port: int
    live: Iteration | None


# Guardian to trainer, besides Resume


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class EnterEpoch:
    """Leave the collectives of earlier epochs; open a rendezvous store where told to."""

    epoch: Epoch
    opens_store: bool
    host: str
    """Address on which this trainer's groups and store listen."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PlanForSlot:
    plan: Plan
    slot: Slot
    """This trainer's."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotHere:
    """The snapshot lies in this node's arena, verified; fetched where `num_bytes` is not 0."""

    epoch: Epoch
    iteration: Iteration
    buffer: int | None
    """None: it is damaged or gone, and the trainer is to take it anew of its live state."""
    num_bytes: int
    seconds: float


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotCommitted:
    """`iteration` is staged on every slot. The seconds are this slot's; zero where its snapshot
    was not captured in this epoch."""

    epoch: Epoch
    iteration: Iteration
    replicate_s: float
    commit_s: float


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TrainerEnd:
    """The job is over. `reason` is empty when training completed."""

    exit_code: int
    reason: str


# Guardian to guardian, on a data connection


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """Keep this replica. Answered by `Answer`; the bytes follow only when it says so."""

    slot: Slot
    epoch: Epoch
    iteration: Iteration
    num_bytes: int
    checksum: int | None
    """Where the owner knows it already. Otherwise it comes behind the bytes."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Sealed:
    """All bytes of an offer were sent; this is what they must sum to. Answered by `Answer`."""

    checksum: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Pull:
    """Give me the replica of `slot` at `iteration`."""

    slot: Slot
    epoch: Epoch
    iteration: Iteration


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """`wants_bytes` answers an offer. An answer to a pull has the bytes' number; the bytes follow,
    and behind them another with their checksum. `refusal` says why not, otherwise empty."""

    wants_bytes: bool = False
    num_bytes: int = 0
    checksum: int = 0
    refusal: str = ""


Message = (
    Hello | Upstream | Downstream
    | TrainerUp | ArenaLayout | SnapshotWanted | Captured | TrainerAborted
    | EnterEpoch | PlanForSlot | SnapshotHere | SnapshotCommitted | TrainerEnd
    | Offer | Sealed | Pull | Answer
)  # fmt: skip

TYPES: tuple[type, ...] = (
    Hello, Heartbeat,
    Join, Support, Aborted, RosterIs, Accepted, Ready, RegroupFailed, Staged, FirstStep, Finished,
    Faltered, Failed, TrainerCrashed, TrainerLost, EndWanted, DrainWanted, EndNoted,
    Welcome, NotLeader, Abort, RosterWanted, Propose, Resume, Install, Committed, Drain, Ended,
    Leave, Fenced,
    TrainerUp, ArenaLayout, SnapshotWanted, Captured, TrainerAborted,
    EnterEpoch, PlanForSlot, SnapshotHere, SnapshotCommitted, TrainerEnd,
    Offer, Sealed, Pull, Answer,
)  # fmt: skip
"""Indexed by the type byte."""

_encoder = msgspec.msgpack.Encoder()
_decoders: tuple[msgspec.msgpack.Decoder[Message], ...] = tuple(
    msgspec.msgpack.Decoder(kind) for kind in TYPES
)
_type_bytes = {kind: bytes([index]) for index, kind in enumerate(TYPES)}


def encode(message: Message) -> bytes:
    """The whole frame."""
    fields = _encoder.encode(message)
    length = 1 + len(fields)
    assert length <= MAX_MESSAGE_BYTES, f"{type(message).__name__}: {length} bytes"
    return length.to_bytes(4, "little") + _type_bytes[type(message)] + fields


def decode(body: bytes | bytearray) -> Message:
    """`body`: a frame without its length. Raises WireError for an unknown type, and
    msgspec.DecodeError, msgspec.ValidationError or RecursionError for fields that are not its.

    Fields that the type does not have are ignored.
    """
    if not body or body[0] >= len(_decoders):
        raise WireError(f"unknown message type {body[0] if body else None}")
    return _decoders[body[0]].decode(memoryview(body)[1:])
