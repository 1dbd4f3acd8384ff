"""Which buffer holds what, and what may be written over. Two buffers with commit before reuse.

An exhaustive search found that two buffers with local-only commit reach states without a common
iteration to restore; two with commit before reuse never do (`tests/protocol/test_search.py`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from deadpool.protocol.events import AnswerOffer, AnswerPull, Asked, Offered, Received
from deadpool.protocol.types import Epoch, Iteration, Slot

NUM_BUFFERS = 2


def capture_buffer(held: Sequence[Iteration | None]) -> int:
    """The buffer of its own memory that a slot captures the next snapshot into: one that holds
    nothing, else the older. held: what each buffer holds."""
    ages = [-1 if iteration is None else iteration for iteration in held]
    return ages.index(min(ages))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """A replica whose checksum was verified on receipt."""

    iteration: Iteration
    num_bytes: int
    checksum: int


class BufferLedger:
    """What the buffers for one slot's replicas hold; None while bytes come in, or for nothing."""

    def __init__(self) -> None:
        self._kept: list[Kept | None] = [None] * NUM_BUFFERS

    def find(self, iteration: Iteration) -> int | None:
        return next(
            (b for b, kept in enumerate(self._kept) if kept and kept.iteration == iteration), None
        )

    def kept(self, buffer: int) -> Kept | None:
        return self._kept[buffer]

    def iterations(self) -> frozenset[Iteration]:
        return frozenset(kept.iteration for kept in self._kept if kept)

    def open(self, iteration: Iteration) -> int:
        """The buffer to receive `iteration` into, now invalid: one with other bytes of the same
        iteration, else the older. The newest is kept whatever comes in."""
        buffer = self.find(iteration)
        if buffer is None:
            buffer = capture_buffer([kept.iteration if kept else None for kept in self._kept])
        self._kept[buffer] = None
        return buffer

    def seal(self, buffer: int, kept: Kept) -> None:
        """The buffer is whole."""
        self._kept[buffer] = kept

    def drop(self, iteration: Iteration) -> None:
        """It is damaged."""
        self._kept = [None if kept and kept.iteration == iteration else kept for kept in self._kept]

    def forget_after(self, iteration: Iteration) -> None:
        """What lies on a timeline that the job has left."""
        self._kept = [None if kept and kept.iteration > iteration else kept for kept in self._kept]


class ShelfLedger:
    """The replicas that one guardian keeps for other slots, and what it answers about them.

    world_size: of slots, so that no peer can make it keep others. Offers and pulls of another
    epoch than the guardian has entered are refused.
    """

    def __init__(self, world_size: int) -> None:
        self._world_size = world_size
        self._slots: dict[Slot, BufferLedger] = {}

    def __getitem__(self, slot: Slot) -> BufferLedger:
        return self._slots.setdefault(slot, BufferLedger())

    def holdings(self) -> frozenset[tuple[Slot, Iteration]]:
        return frozenset(
            (slot, iteration)
            for slot, ledger in self._slots.items()
            for iteration in ledger.iterations()
        )

    def forget_after(self, iteration: Iteration) -> None:
        for ledger in self._slots.values():
            ledger.forget_after(iteration)

    def drop(self, slot: Slot, iteration: Iteration) -> None:
        """A replica turned out to be damaged; nothing where it is not kept."""
        if slot in self._slots:
            self._slots[slot].drop(iteration)

    def answer_offer(self, offer: Offered, epoch: Epoch) -> AnswerOffer:
        if offer.epoch != epoch:
            return AnswerOffer(buffer=None, refusal=f"epoch {offer.epoch}, now is {epoch}")
        if not 0 <= offer.slot < self._world_size:
            return AnswerOffer(buffer=None, refusal=f"there is no slot {offer.slot}")
        ledger = self[offer.slot]
        buffer = ledger.find(offer.iteration)
        kept = ledger.kept(buffer) if buffer is not None else None
        if kept and (kept.num_bytes, kept.checksum) == (offer.num_bytes, offer.checksum):
            return AnswerOffer(buffer=None, refusal="")
        return AnswerOffer(buffer=ledger.open(offer.iteration), refusal="")

    def seal(self, received: Received, epoch: Epoch) -> AnswerOffer:
        """The bytes of an offer have come: keep them if they are whole and of this epoch."""
        if received.checksum != received.announced:
            refusal = f"checksum {received.checksum:#x}, announced {received.announced:#x}"
            return AnswerOffer(buffer=None, refusal=refusal)
        if received.epoch != epoch:
            return AnswerOffer(buffer=None, refusal=f"epoch {received.epoch} has passed")
        kept = Kept(
            iteration=received.iteration,
            num_bytes=received.num_bytes,
            checksum=received.checksum,
        )
        self[received.slot].seal(received.buffer, kept)
        return AnswerOffer(buffer=None, refusal="")

    def answer_pull(self, asked: Asked, epoch: Epoch) -> AnswerPull:
        is_slot = 0 <= asked.slot < self._world_size
        buffer = self[asked.slot].find(asked.iteration) if is_slot else None
        if asked.epoch == epoch and buffer is not None:
            return AnswerPull(buffer=buffer, refusal="")
        refusal = (
            f"no replica of slot {asked.slot} at iteration {asked.iteration} here in epoch "
            f"{epoch}, asked in epoch {asked.epoch}"
        )
        return AnswerPull(buffer=None, refusal=refusal)
