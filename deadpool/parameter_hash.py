"""Hashes of model parameters, compared across data-parallel peers before anyone resumes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
import xxhash
from megatron.core import parallel_state


class ParametersDiffer(Exception):
    """Data-parallel peers do not hold the same parameters after a recovery."""


def hash_tensors(tensors: Iterable[torch.Tensor]) -> int:
    """XXH3 (64 bits) over the bytes of the tensors, in order."""
    digest = xxhash.xxh3_64()
    for tensor in tensors:
        flat = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)
        digest.update(flat.numpy())
    return digest.intdigest()


def split_parameters(model: list[Any]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Dense and expert parameters: they are replicated over different groups."""
    dense: list[torch.Tensor] = []
    expert: list[torch.Tensor] = []
    for chunk in model:
        for parameter in chunk.parameters():
            (dense if getattr(parameter, "allreduce", True) else expert).append(parameter.data)
    return dense, expert


def hash_parameters(model: list[Any]) -> int:
    """Over all parameters of this rank."""
    dense, expert = split_parameters(model)
    return hash_tensors(dense + expert)


def verify_parameters(model: list[Any]) -> None:
    """Raise ParametersDiffer unless all data-parallel peers agree. All ranks call it together."""
    dense, expert = split_parameters(model)
    _compare(dense, parallel_state.get_data_parallel_group(with_context_parallel=True), "dense")
    if expert:
        _compare(expert, parallel_state.get_expert_data_parallel_group(), "expert")


def _compare(tensors: list[torch.Tensor], group: dist.ProcessGroup, kind: str) -> None:
    device = tensors[0].device if tensors else torch.device("cpu")
    mine = torch.tensor([hash_tensors(tensors) - (1 << 63)], dtype=torch.int64, device=device)
    theirs = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(theirs, mine, group=group)
    if any(not torch.equal(mine, other) for other in theirs):
        ranks = dist.get_process_group_ranks(group)
        raise ParametersDiffer(
            f"after the recovery the {kind} parameters differ between the data-parallel slots "
            f"{', '.join(map(str, ranks))}"
        )
