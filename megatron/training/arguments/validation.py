"""Checks a parsed command line as a whole and fills in what follows from it."""

from __future__ import annotations

import argparse

from megatron.training.arguments.adaptation import adapt_to_machine
from megatron.training.arguments.checkpoint_args import apply_checkpoint_args
from megatron.training.arguments.configs import (
    ddp_config_from_args,
    optimizer_config_from_args,
    transformer_config_from_args,
)
from megatron.training.arguments.machine import Machine, detect_machine
from megatron.training.arguments.requirements import check_requirements
from megatron.training.arguments.rules_checkpoint import check_checkpoints
from megatron.training.arguments.rules_data import (
    check_data,
    check_evaluation,
    check_tokenizer,
)
from megatron.training.arguments.rules_model import (
    check_experts,
    check_recompute,
    check_required,
    check_shape,
)
from megatron.training.arguments.rules_parallel import (
    check_connections,
    check_context_parallel,
    check_overlap,
    check_pipeline,
    check_sequence_parallel,
    check_world,
)
from megatron.training.arguments.rules_training import (
    check_batch,
    check_determinism,
    check_duration,
    check_optimizer,
    check_precision,
    check_schedule,
)


def validate_args(
    args: argparse.Namespace, world_size: int, machine: Machine | None = None
) -> argparse.Namespace:
    """Fill derived values into `args`, which is also returned, or raise `UsageError`.

    Needs no process group and talks to no other rank: every rank comes to the same result from
    the same flags. `world_size`: ranks that train. `machine`: what to assume of the hardware
    instead of looking. With --deterministic-mode it also sets torch to deterministic kernels.
    Notes for the user are appended to `args.notes`.
    """
    machine = machine or detect_machine()
    apply_checkpoint_args(args)
    adapt_to_machine(args, machine)
    check_required(args)
    check_world(args, world_size)
    check_pipeline(args)
    check_overlap(args)
    check_sequence_parallel(args)
    check_context_parallel(args)
    check_shape(args)
    check_experts(args)
    check_recompute(args)
    check_requirements(args, machine)
    check_batch(args)
    check_duration(args)
    check_schedule(args)
    check_precision(args)
    check_optimizer(args)
    check_evaluation(args)
    check_data(args)
    check_tokenizer(args)
    check_checkpoints(args)
    check_connections(args, machine)
    check_determinism(args, machine)
    _check_configs(args)
    return args


def _check_configs(args: argparse.Namespace) -> None:
    """megatron-core's dataclasses check themselves: let them, before anybody waits for a rank."""
    transformer_config_from_args(args)
    optimizer_config_from_args(args)
    ddp_config_from_args(args, num_parameters=0)
