"""One microbatch on the device: read by tensor-parallel rank 0, broadcast to its peers."""

from __future__ import annotations

import dataclasses
from argparse import Namespace
from collections.abc import Iterator
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.utils import get_batch_on_this_cp_rank

from megatron.training import device


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """What one model chunk needs of a microbatch; the rest is None."""

    tokens: torch.Tensor | None = None
    """[micro_batch, sequence] int64"""
    position_ids: torch.Tensor | None = None
    """[micro_batch, sequence] int64"""
    labels: torch.Tensor | None = None
    """[micro_batch, sequence] int64"""
    loss_mask: torch.Tensor | None = None
    """[micro_batch, sequence] fp32"""
    attention_mask: torch.Tensor | None = None
    """[micro_batch, 1, sequence, sequence] bool, True where attention is forbidden"""


def get_batch(args: Namespace, iterator: Iterator[Any] | None, *, first: bool, last: bool) -> Batch:
    """Fetch the next microbatch for a chunk that is the `first` or `last` of the pipeline.

    The tensor-parallel group calls it together. Chunks in between get an empty batch.
    """
    if not (first or last):
        return Batch()
    reader = parallel_state.get_tensor_model_parallel_rank() == 0
    sample = next(iterator) if reader and iterator is not None else None
    if reader and sample is None:
        raise RuntimeError("this rank should read data but has no data set")
    shape = (args.micro_batch_size, args.seq_length)
    fields: dict[str, torch.Tensor | None] = {}
    if first:
        fields["tokens"] = _shared(sample, "tokens", shape, torch.int64)
        fields["position_ids"] = _shared(sample, "position_ids", shape, torch.int64)
    if last:
        fields["labels"] = _shared(sample, "labels", shape, torch.int64)
        fields["loss_mask"] = _shared(sample, "loss_mask", shape, torch.float32)
    if args.create_attention_mask_in_dataloader:
        square = (args.micro_batch_size, 1, args.seq_length, args.seq_length)
        fields["attention_mask"] = _shared(sample, "attention_mask", square, torch.bool)
    if args.context_parallel_size > 1:
        fields = get_batch_on_this_cp_rank(fields)
    return Batch(**fields)


def _shared(
    sample: dict[str, torch.Tensor] | None, name: str, shape: tuple[int, ...], dtype: torch.dtype
) -> torch.Tensor:
    here = device.device()
    if sample is not None:
        tensor = sample[name].to(here, non_blocking=True)
    else:
        tensor = torch.empty(shape, dtype=dtype, device=here)
    if parallel_state.get_tensor_model_parallel_world_size() > 1:
        torch.distributed.broadcast(
            tensor,
            parallel_state.get_tensor_model_parallel_src_rank(),
            group=parallel_state.get_tensor_model_parallel_group(),
        )
    return tensor
