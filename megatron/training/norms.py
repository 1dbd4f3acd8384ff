"""The norm of all parameters, and whether data-parallel ranks hold the same ones."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel import param_is_not_tensor_parallel_duplicate
from megatron.core.transformer.module import param_is_not_shared
from megatron.core.utils import check_param_hashes_across_dp_replicas

from megatron.training import device


def parameter_norm(args: Namespace, model: list[Any]) -> float:
    """Euclidean norm over the whole model, each parameter counted once. All ranks call it.

    In bf16 the fp32 main parameters count, which the distributed optimizer may have sharded.
    """
    dense, sharded, expert = _squares(), _squares(), _squares()
    for chunk in model:
        for parameter in chunk.parameters():
            if not param_is_not_tensor_parallel_duplicate(parameter):
                continue
            is_expert = not getattr(parameter, "allreduce", True)
            if not is_expert and not param_is_not_shared(parameter):
                continue
            value, is_sharded = parameter.data, False
            if args.bf16 and hasattr(parameter, "main_param"):
                value = parameter.main_param
                is_sharded = getattr(parameter, "main_param_sharded", False)
            if value is None:
                continue
            total = sharded if is_sharded else expert if is_expert else dense
            total += value.float().norm() ** 2
    _sum_over(sharded, parallel_state.get_data_parallel_group(with_context_parallel=True))
    dense += sharded
    dense_group = parallel_state.get_model_parallel_group()
    expert_group = parallel_state.get_expert_tensor_model_pipeline_parallel_group()
    ranks_of = torch.distributed.get_process_group_ranks
    if ranks_of(dense_group) == ranks_of(expert_group):
        dense += expert
        _sum_over(dense, dense_group)
    else:
        _sum_over(dense, dense_group)
        _sum_over(expert, expert_group)
        dense += expert
    return dense.item() ** 0.5


def _squares() -> torch.Tensor:
    return torch.zeros(1, dtype=torch.float32, device=device.device())


def _sum_over(value: torch.Tensor, group: Any) -> None:
    torch.distributed.all_reduce(value, op=torch.distributed.ReduceOp.SUM, group=group)


def parameter_hashes_agree(model: list[Any]) -> bool:
    """Whether all data-parallel ranks hold the same parameters to the bit. All ranks call it."""
    return bool(check_param_hashes_across_dp_replicas(model, cross_check=True))
