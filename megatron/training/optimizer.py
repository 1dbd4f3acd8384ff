"""The optimizer and the schedule of its learning rate and weight decay."""

from __future__ import annotations

import contextlib
from argparse import Namespace
from collections.abc import Iterator
from typing import Any

import torch
from megatron.core.num_microbatches_calculator import (
    get_current_global_batch_size,
    update_num_microbatches,
)
from megatron.core.optimizer import (
    MegatronOptimizer,
    OptimizerConfig,
    get_megatron_optimizer,
    get_standard_config_overrides,
)
from megatron.core.optimizer_param_scheduler import (
    OptimizerParamScheduler,
    param_group_override_to_tuple,
)

from megatron.training.output import print_rank_0


def build_optimizer(
    args: Namespace, config: OptimizerConfig, model: list[Any], *, alone: bool
) -> MegatronOptimizer:
    """The optimizer of this rank's model chunks.

    megatron-core gathers the keys of the parameter groups from all ranks, so that every rank has
    the same groups. A process that joins a running job builds `alone`: it takes the keys that the
    flags imply instead; every other start checks that the two agree.
    """
    overrides = get_standard_config_overrides(config)
    expected = _expected_group_keys(args, config, overrides)
    with _gathered_group_keys(expected, alone=alone):
        return get_megatron_optimizer(
            config,
            model,
            config_overrides=overrides,
            use_gloo_process_groups=args.enable_gloo_process_groups,
        )


def _expected_group_keys(
    args: Namespace, config: OptimizerConfig, overrides: dict[Any, Any]
) -> set[tuple[Any, bool]]:
    """(overrides as a tuple or None, is expert parallel) of all groups of the whole model."""
    by_override = [param_group_override_to_tuple(override) for override in overrides.values()]
    undecayed = by_override[0]
    keys: set[tuple[Any, bool]] = {(None, False), (undecayed, False)}
    keys |= {(decoupled, False) for decoupled in by_override[1:]}
    if args.num_experts and args.expert_model_parallel_size > 1:
        keys.add((None, True))
        if args.add_bias_linear:
            keys.add((undecayed, True))
    return keys


@contextlib.contextmanager
def _gathered_group_keys(expected: set[tuple[Any, bool]], *, alone: bool) -> Iterator[None]:
    gather = torch.distributed.all_gather_object

    def gather_keys(results: list[Any], mine: Any, *args: Any, **kwargs: Any) -> None:
        if alone:
            results[:] = [sorted(expected, key=repr)] * len(results)
            return
        gather(results, mine, *args, **kwargs)
        found = {key for keys in results for key in keys}
        if found != expected:
            raise NotImplementedError(
                f"the model's parameter groups are {sorted(found, key=repr)}, the flags imply "
                f"{sorted(expected, key=repr)}: a process could not join this job later"
            )

    torch.distributed.all_gather_object = gather_keys
    try:
        yield
    finally:
        torch.distributed.all_gather_object = gather


def allocate_torch_adam_state(optimizer: MegatronOptimizer) -> None:
    """Give torch's Adam the state it otherwise makes in its first step.

    megatron-core 0.16.1 reads the step count of every parameter before it loads a checkpoint, which
    fails on a fresh optimizer; with Apex or Transformer Engine it does not.
    """
    for inner, parameter, _ in _torch_adam_parameters(optimizer):
        if not inner.state[parameter]:
            inner.state[parameter] = {
                "step": torch.tensor(0.0, dtype=torch.float32),
                "exp_avg": torch.zeros_like(parameter.data),
                "exp_avg_sq": torch.zeros_like(parameter.data),
            }


def restore_torch_adam_steps(optimizer: MegatronOptimizer) -> None:
    """Set the step counts that loading left wrong.

    megatron-core 0.16.1 puts the loaded count into the parameter groups; the counts of the
    parameters, which torch's Adam uses, are one shared tensor after loading, with the value from
    before.
    """
    for inner, parameter, group in _torch_adam_parameters(optimizer):
        state = inner.state[parameter]
        if "step" in state:
            count = float(group.get("step", state["step"]))
            state["step"] = torch.tensor(count, dtype=torch.float32)


def _torch_adam_parameters(
    optimizer: Any,
) -> Iterator[tuple[Any, torch.Tensor, dict[str, Any]]]:
    for one in getattr(optimizer, "chained_optimizers", [optimizer]):
        inner = one.optimizer
        if isinstance(inner, (torch.optim.Adam, torch.optim.AdamW)):
            for group in inner.param_groups:
                for parameter in group["params"]:
                    yield inner, parameter, group


def build_scheduler(args: Namespace, optimizer: MegatronOptimizer) -> OptimizerParamScheduler:
    """The schedule, in samples. With `--train-samples` this also sets `args.train_iters`."""
    if args.train_samples:
        set_train_iters(args)
        args.lr_decay_samples = args.lr_decay_samples or args.train_samples
        decay_steps = args.lr_decay_samples
        weight_decay_steps = args.train_samples
        warmup_steps = args.lr_warmup_samples
        wsd_decay_steps = args.lr_wsd_decay_samples
    else:
        batch = args.global_batch_size
        if args.lr_decay_iters is None:
            args.lr_decay_iters = args.train_iters
        decay_steps = args.lr_decay_iters * batch
        weight_decay_steps = args.train_iters * batch
        warmup_steps = args.lr_warmup_iters * batch
        wsd = args.lr_wsd_decay_iters
        wsd_decay_steps = None if wsd is None else wsd * batch
    if args.lr_warmup_fraction is not None:
        warmup_steps = args.lr_warmup_fraction * decay_steps
    return OptimizerParamScheduler(
        optimizer,
        init_lr=args.lr_warmup_init,
        max_lr=args.lr,
        min_lr=args.min_lr,
        lr_warmup_steps=warmup_steps,
        lr_decay_steps=decay_steps,
        lr_decay_style=args.lr_decay_style,
        start_wd=args.start_weight_decay,
        end_wd=args.end_weight_decay,
        wd_incr_steps=weight_decay_steps,
        wd_incr_style=args.weight_decay_incr_style,
        use_checkpoint_opt_param_scheduler=args.use_checkpoint_opt_param_scheduler,
        override_opt_param_scheduler=args.override_opt_param_scheduler,
        wsd_decay_steps=wsd_decay_steps,
        lr_wsd_decay_style=args.lr_wsd_decay_style,
    )


def set_train_iters(args: Namespace) -> None:
    """Derive `args.train_iters` from `--train-samples`. The incomplete last batch is dropped."""
    if args.train_iters:
        return
    iterations, consumed = 0, 0
    if args.rampup_batch_size is not None:
        ramp_samples = int(args.rampup_batch_size[2])
        while consumed <= min(ramp_samples, args.train_samples):
            update_num_microbatches(consumed, consistency_check=False)
            consumed += get_current_global_batch_size()
            iterations += 1
        update_num_microbatches(0, consistency_check=False)
    if args.train_samples > consumed:
        iterations += (args.train_samples - consumed) // args.global_batch_size
    args.train_iters = iterations
    print_rank_0(f"setting training iterations to {args.train_iters}")
