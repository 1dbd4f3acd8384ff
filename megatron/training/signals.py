"""A signal that asks the job to save and leave, decided by all ranks together."""

from __future__ import annotations

import signal
from types import FrameType

import torch

from megatron.training import device


class ExitSignal:
    """Remembers that `number` arrived; the loop asks at the end of every iteration."""

    def __init__(self, number: signal.Signals) -> None:
        self._received = False
        signal.signal(number, self._note)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._received = True

    def received_anywhere(self) -> bool:
        """Whether any rank received it. Every rank calls this together."""
        return any_rank(self._received)


def any_rank(flag: bool) -> bool:
    """Whether `flag` holds on any rank of the job. Every rank calls this together."""
    value = torch.tensor([int(flag)], dtype=torch.int32, device=device.device())
    torch.distributed.all_reduce(value, op=torch.distributed.ReduceOp.MAX)
    return bool(value.item())
