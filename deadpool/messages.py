"""What travels between processes: typed, size-bounded, MessagePack by msgspec; never pickle.

Guardian and leader talk over TCP, trainer and guardian over a socket pair, guardians among
themselves over TCP (replicas: a header here, then raw bytes).
"""

from __future__ import annotations

import msgspec

from deadpool.protocol.types import Epoch, Holdings, Iteration, MemberId, Plan, Slot

MAX_MESSAGE_BYTES = 64 << 20
"""A plan for 10,000 slots is about 1 MB."""


class Message(msgspec.Struct, frozen=True, kw_only=True, tag=True, forbid_unknown_fields=True):
    """Base of everything sent."""


# Guardian to leader


class Hello(Message):
    """First on a connection. `token` proves that the guardian belongs to this job."""

    token: str
    node: int
    local_rank: int
    host: str
    data_port: int


class Aborted(Message):
    epoch: Epoch
    store_port: int
    holdings: Holdings


class Ready(Message):
    """`seconds` by stage, `num_bytes` brought from other nodes, by this member."""

    epoch: Epoch
    seconds: dict[str, float]
    num_bytes: int
    iterations_rerun: int


class RegroupFailed(Message):
    epoch: Epoch
    reason: str


class Staged(Message):
    epoch: Epoch
    iteration: Iteration


class FirstStep(Message):
    """The first iteration after a recovery is complete."""

    epoch: Epoch
    iteration: Iteration
    seconds: float


class Finished(Message):
    epoch: Epoch


class Failed(Message):
    reason: str
    exit_code: int


class TrainerLost(Message):
    """The trainer process ended by a signal: its node counts as lost."""

    reason: str


# Leader to guardian


class Welcome(Message):
    member: MemberId


class Abort(Message):
    epoch: Epoch
    opens_store: bool


class NewPlan(Message):
    plan: Plan


class Resume(Message):
    epoch: Epoch


class Committed(Message):
    epoch: Epoch
    iteration: Iteration


class Drain(Message):
    """The job was asked to end: pass SIGTERM on to the trainer, which saves and finishes."""


class End(Message):
    exit_code: int
    reason: str


# Trainer to guardian (besides Aborted with empty holdings, Ready, RegroupFailed, ...)


class TrainerUp(Message):
    """Everything is imported; a slot may be given."""


class ArenaLayout(Message):
    """The trainer has given the arena memory its size."""

    payload_bytes: int


class SnapshotWanted(Message):
    """Answered by SnapshotHere once the snapshot lies in the arena."""

    epoch: Epoch
    iteration: Iteration


class Captured(Message):
    """Buffer `buffer` holds the whole snapshot of `iteration`."""

    epoch: Epoch
    iteration: Iteration
    buffer: int


# Guardian to trainer (besides Abort, Resume, Committed, End)


class PlanForSlot(Message):
    plan: Plan
    slot: Slot


class SnapshotHere(Message):
    """The snapshot of a replaced slot has come into this node's arena."""

    epoch: Epoch
    iteration: Iteration
    buffer: int
    num_bytes: int
    seconds: float


# Guardian to guardian


class Offer(Message):
    """Keep this replica. Answered by `Answer`; the bytes follow only when it says so."""

    token: str
    slot: Slot
    epoch: Epoch
    iteration: Iteration
    num_bytes: int
    checksum: int


class Pull(Message):
    """Give me the replica of `slot` at `iteration`."""

    token: str
    slot: Slot
    iteration: Iteration


class Answer(Message):
    """`wants_bytes` answers an offer. With `num_bytes` > 0 (answer to a pull) the bytes follow.
    `refusal` says why not, otherwise empty."""

    wants_bytes: bool = False
    num_bytes: int = 0
    checksum: int = 0
    refusal: str = ""


AnyMessage = (
    Hello
    | Aborted
    | Ready
    | RegroupFailed
    | Staged
    | FirstStep
    | Finished
    | Failed
    | TrainerLost
    | Welcome
    | Abort
    | NewPlan
    | Resume
    | Committed
    | Drain
    | End
    | TrainerUp
    | ArenaLayout
    | SnapshotWanted
    | Captured
    | PlanForSlot
    | SnapshotHere
    | Offer
    | Pull
    | Answer
)

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(AnyMessage)


def encode(message: Message) -> bytes:
    """Length (4 bytes, little endian) and body."""
    body = _encoder.encode(message)
    assert len(body) <= MAX_MESSAGE_BYTES, f"{type(message).__name__}: {len(body)} bytes"
    return len(body).to_bytes(4, "little") + body


def decode(body: bytes) -> AnyMessage:
    """Raises msgspec.DecodeError or msgspec.ValidationError for what is no message."""
    return _decoder.decode(body)
