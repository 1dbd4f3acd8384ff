"""Which iteration is staged on every slot, in constant time a message."""

from __future__ import annotations

from deadpool.protocol.types import Iteration, MemberId


class Commits:
    """Of one epoch. world_size: slots that must have staged."""

    def __init__(self, world_size: int) -> None:
        self._world_size = world_size
        self._staged: dict[MemberId, Iteration] = {}
        self._counts: dict[Iteration, int] = {}

    def stage(self, member: MemberId, iteration: Iteration) -> bool:
        """Whether `iteration` is committed by this. A slot stages iterations in order, so each is
        complete when all have named it."""
        if iteration <= self._staged.get(member, -1):
            return False
        self._staged[member] = iteration
        count = self._counts[iteration] = self._counts.get(iteration, 0) + 1
        if count < self._world_size:
            return False
        del self._counts[iteration]
        return True
