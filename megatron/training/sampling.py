"""Which samples a rank reads, as a pure function of how many were consumed before."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import torch


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SampleOrder:
    """Indices of one data-parallel rank's microbatches, from `consumed_samples` on.

    `shuffled` is Megatron-LM's `--dataloader-type cyclic`: every epoch in an order of its own,
    without end. Otherwise (`single`) the data set's own order is kept, once.
    """

    total_samples: int
    consumed_samples: int
    micro_batch_size: int
    data_parallel_rank: int
    data_parallel_size: int
    shuffled: bool = False
    data_sharding: bool = True
    """With `shuffled`: each rank shuffles a contiguous part of its own (Megatron-LM's default)."""

    def __post_init__(self) -> None:
        if self.total_samples <= 0:
            raise ValueError("the data set has no samples: give more data or another --split")
        if not self.shuffled and self.consumed_samples >= self.total_samples:
            raise ValueError(
                f"all {self.total_samples} samples of the data set are consumed already "
                f"({self.consumed_samples}): there is nothing left to read"
            )

    def __iter__(self) -> Iterator[list[int]]:
        if not self.shuffled:
            yield from self._in_order()
            return
        consumed = self.consumed_samples
        while True:
            count = 0
            for batch in self._epoch(consumed):
                count += 1
                yield batch
            if count == 0:
                raise ValueError(
                    f"the data set's {self.total_samples} samples are fewer than one microbatch "
                    f"on each of {self.data_parallel_size} data-parallel ranks"
                )
            consumed += count * self._samples_per_step

    @property
    def _samples_per_step(self) -> int:
        return self.micro_batch_size * self.data_parallel_size

    def _in_order(self) -> Iterator[list[int]]:
        first = self.consumed_samples + self.data_parallel_rank * self.micro_batch_size
        whole_steps = (self.total_samples - self.consumed_samples) // self._samples_per_step
        for step in range(whole_steps):
            start = first + step * self._samples_per_step
            yield list(range(start, start + self.micro_batch_size))

    def _epoch(self, consumed: int) -> Iterator[list[int]]:
        per_epoch = self.total_samples - self.total_samples % self._samples_per_step
        if per_epoch == 0:
            return
        epoch, within = divmod(consumed, per_epoch)
        generator = torch.Generator()
        generator.manual_seed(epoch)
        if self.data_sharding:
            part = self.total_samples // self._samples_per_step * self.micro_batch_size
            order = torch.randperm(part, generator=generator)[within // self.data_parallel_size :]
            mine = (order + self.data_parallel_rank * part).tolist()
        else:
            whole = self.total_samples // self.micro_batch_size * self.micro_batch_size
            order = torch.randperm(whole, generator=generator)[within:]
            mine = order[self.data_parallel_rank :: self.data_parallel_size].tolist()
        for start in range(0, len(mine) - self.micro_batch_size + 1, self.micro_batch_size):
            yield mine[start : start + self.micro_batch_size]
