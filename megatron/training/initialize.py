"""From flags to a rank in the grid: process groups, random seeds and megatron-core's globals."""

from __future__ import annotations

import os
import random
from argparse import Namespace
from datetime import timedelta
from functools import partial
from typing import Any

import numpy as np
import torch
from megatron.core import parallel_state, tensor_parallel
from megatron.core.fusions.fused_bias_dropout import bias_dropout_add_fused_train
from megatron.core.fusions.fused_bias_gelu import bias_gelu
from megatron.core.fusions.fused_bias_swiglu import bias_swiglu
from megatron.core.num_microbatches_calculator import init_num_microbatches_calculator
from megatron.core.rerun_state_machine import (
    RerunMode,
    destroy_rerun_state_machine,
    initialize_rerun_state_machine,
)
from megatron.core.tensor_parallel import get_cuda_rng_tracker

from megatron.training import device
from megatron.training.model import embedding_ranks
from megatron.training.output import print_rank_0


def adopt_rank(args: Namespace) -> None:
    """Take rank, world size and local rank from the launcher's environment."""
    args.rank = int(os.environ.get("RANK", "0"))
    args.world_size = int(os.environ.get("WORLD_SIZE", "1"))
    args.local_rank = int(os.environ.get("LOCAL_RANK", "0"))


def create_process_groups(args: Namespace, **overrides: Any) -> None:
    """Make torch's default group and every group of megatron-core's grid.

    `overrides` replace keywords of `torch.distributed.init_process_group`.
    """
    timeout = timedelta(minutes=args.distributed_timeout_minutes)
    keywords: dict[str, Any] = {
        "backend": args.distributed_backend,
        "world_size": args.world_size,
        "rank": args.rank,
        "timeout": timeout,
    }
    if not {"store", "init_method"} & overrides.keys() and "MASTER_ADDR" not in os.environ:
        if args.world_size > 1:
            raise RuntimeError(
                "MASTER_ADDR and MASTER_PORT are not set: start several ranks with torchrun"
            )
        keywords["store"] = torch.distributed.HashStore()
    torch.distributed.init_process_group(**{**keywords, **overrides})
    parallel_state.initialize_model_parallel(
        args.tensor_model_parallel_size,
        args.pipeline_model_parallel_size,
        args.virtual_pipeline_model_parallel_size,
        context_parallel_size=args.context_parallel_size,
        expert_model_parallel_size=args.expert_model_parallel_size,
        expert_tensor_parallel_size=args.expert_tensor_parallel_size,
        num_distributed_optimizer_instances=args.num_distributed_optimizer_instances,
        distributed_timeout_minutes=args.distributed_timeout_minutes,
        order="tp-cp-ep-pp-dp" if args.use_tp_pp_dp_mapping else "tp-cp-ep-dp-pp",
        get_embedding_ranks=partial(embedding_ranks, args),
        create_gloo_process_groups=args.enable_gloo_process_groups,
    )
    tensor_size = parallel_state.get_tensor_model_parallel_world_size()
    pipeline_size = parallel_state.get_pipeline_model_parallel_world_size()
    print_rank_0(f"> initialized tensor model parallel with size {tensor_size}")
    print_rank_0(f"> initialized pipeline model parallel with size {pipeline_size}")


def initialize_core(args: Namespace) -> None:
    """megatron-core's process-wide state that no group is needed for."""
    init_num_microbatches_calculator(
        args.rank,
        args.rampup_batch_size,
        args.global_batch_size,
        args.micro_batch_size,
        args.data_parallel_size,
        getattr(args, "decrease_batch_size_if_needed", False),
    )
    destroy_rerun_state_machine()
    initialize_rerun_state_machine(
        state_save_func=lambda: {"tracker": get_cuda_rng_tracker().get_states()},
        state_restore_func=lambda state: get_cuda_rng_tracker().set_states(state["tracker"]),
        mode=RerunMode(args.rerun_mode),
        result_rejected_tracker_filename=args.result_rejected_tracker_filename,
    )


def seed_everything(args: Namespace) -> None:
    """Seed every generator in Megatron-LM's order, which decides the initial weights."""
    print_rank_0(f"> setting random seeds to {args.seed} ...")
    seed = args.seed + 100 * parallel_state.get_pipeline_model_parallel_rank()
    if args.data_parallel_random_init:
        seed += 10 * parallel_state.get_data_parallel_rank()
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    tensor_parallel.model_parallel_cuda_manual_seed(
        seed, getattr(args, "te_rng_tracker", False), getattr(args, "inference_rng_tracker", False)
    )


def warm_up_fused_functions(args: Namespace) -> None:
    """Run the fused functions once in every state of gradients they meet.

    On a GPU this compiles them ahead of the first iteration. It also draws from the default
    generator, before any weight: Megatron-LM does the same, so initial position embeddings and
    dropout agree with its own only if this is done.
    """
    dtype = args.params_dtype
    here = device.device()
    make = partial(torch.rand, dtype=dtype, device=here)
    ffn_width = args.ffn_hidden_size // args.tensor_model_parallel_size
    length = args.seq_length // args.context_parallel_size
    bias = make(ffn_width)
    value = make((length, args.micro_batch_size, ffn_width))
    activation = (lambda: bias_swiglu(value, bias)) if args.swiglu else (
        lambda: bias_gelu(bias, value)
    )  # fmt: skip
    for value_gradient in (False, True):
        bias.requires_grad, value.requires_grad = True, value_gradient
        for _ in range(5):
            activation()
    if args.sequence_parallel:
        length //= args.tensor_model_parallel_size
    value = make((length, args.micro_batch_size, args.hidden_size))
    residual = make((length, args.micro_batch_size, args.hidden_size))
    bias = make(args.hidden_size).expand_as(residual)
    for value_gradient, bias_gradient, residual_gradient in (
        (False, True, True),
        (True, True, True),
    ):
        value.requires_grad = value_gradient
        bias.requires_grad = bias_gradient
        residual.requires_grad = residual_gradient
        for _ in range(5):
            bias_dropout_add_fused_train([value, bias], residual, 0.1)
    torch.cuda.empty_cache()
