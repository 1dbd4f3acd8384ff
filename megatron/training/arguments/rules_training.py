"""Rules about batches, duration, schedules, precision and the optimizer."""

from __future__ import annotations

import argparse
import os

import torch

from megatron.training.arguments.errors import UsageError
from megatron.training.arguments.machine import Machine
from megatron.training.arguments.rules_parallel import divisors, multiples

DTYPES = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp8": torch.uint8,
}
DETERMINISTIC_ALGORITHMS = ("Tree", "Ring", "CollnetDirect", "CollnetChain", "^NVLS")
"""Values of NCCL_ALGO under which reductions always add in the same order."""


def check_batch(args: argparse.Namespace) -> None:
    """Batch sizes divide among ranks; sets `global_batch_size`."""
    once = args.micro_batch_size * args.data_parallel_size
    if args.global_batch_size is None:
        args.global_batch_size = once
    batch = args.global_batch_size
    if args.rampup_batch_size is not None:
        _check_rampup(args, once)
    elif batch % once and not (args.decrease_batch_size_if_needed and batch > once):
        raise UsageError(
            f"--global-batch-size {batch} does not divide by --micro-batch-size "
            f"{args.micro_batch_size} x data-parallel size {args.data_parallel_size} = {once}; "
            f"global batches that fit: {multiples(once, around=batch)}"
        )
    _check_microbatches(args, batch // once)


def _check_rampup(args: argparse.Namespace, once: int) -> None:
    start, step, samples = args.rampup_batch_size
    given = f"--rampup-batch-size {start} {step} {samples}"
    batch = args.global_batch_size
    if start < 1 or step < 1 or samples < 0:
        raise UsageError(f"{given}: start and increment must be at least 1, samples at least 0")
    if start > batch or (batch - start) % step:
        fits = divisors(batch - start) if start < batch else "none: lower the start"
        raise UsageError(
            f"{given} does not reach --global-batch-size {batch} in whole increments; "
            f"increments that fit: {fits}"
        )
    uneven = start % once or step % once or batch % once
    if uneven and not args.decrease_batch_size_if_needed:
        raise UsageError(
            f"{given} up to --global-batch-size {batch}: start, increment and end must divide by "
            f"--micro-batch-size {args.micro_batch_size} x data-parallel size "
            f"{args.data_parallel_size} = {once}; values that fit: {multiples(once, around=start)}"
        )


def _check_microbatches(args: argparse.Namespace, number: int) -> None:
    group = args.microbatch_group_size_per_vp_stage or args.pipeline_model_parallel_size
    if args.virtual_pipeline_model_parallel_size is None:
        return
    if group < args.pipeline_model_parallel_size:
        raise UsageError(
            f"--microbatch-group-size-per-virtual-pipeline-stage {group}: must be at least "
            f"--pipeline-model-parallel-size {args.pipeline_model_parallel_size}"
        )
    remainder = number % group
    if number < group or 0 < remainder < args.pipeline_model_parallel_size:
        once = args.micro_batch_size * args.data_parallel_size * args.pipeline_model_parallel_size
        raise UsageError(
            f"the interleaved schedule cannot run {number} microbatches over "
            f"--pipeline-model-parallel-size {args.pipeline_model_parallel_size}; "
            f"--global-batch-size that fits: "
            f"{multiples(once, around=args.global_batch_size)}"
        )


def check_duration(args: argparse.Namespace) -> None:
    """Training is counted in iterations or in samples, not both."""
    for name in ("train_iters", "train_samples", "exit_interval", "log_interval", "eval_interval"):
        given = getattr(args, name)
        if given is not None and given < 1:
            raise UsageError(f"--{name.replace('_', '-')} {given}: must be at least 1")
    if args.train_iters is None and args.train_samples is None:
        raise UsageError("missing --train-iters or --train-samples: say how long to train")
    by_iterations = args.train_iters is not None
    unit, other = ("iters", "samples") if by_iterations else ("samples", "iters")
    clashing = {
        f"train_{other}": None,
        f"lr_decay_{other}": None,
        f"lr_wsd_decay_{other}": None,
        f"lr_warmup_{other}": 0,
    }
    if by_iterations:
        clashing["rampup_batch_size"] = None
    for name, absent in clashing.items():
        if getattr(args, name) != absent:
            flag = name.replace("_", "-")
            instead = (
                f"use --{flag.replace(other, unit)}" if other in flag else "use --train-samples"
            )
            raise UsageError(f"--{flag} does not go with --train-{unit}: {instead} or leave it out")
    if args.lr_warmup_fraction is not None and getattr(args, f"lr_warmup_{unit}") != 0:
        raise UsageError(
            f"--lr-warmup-fraction {args.lr_warmup_fraction} and --lr-warmup-{unit} "
            f"{getattr(args, f'lr_warmup_{unit}')} both set the warm-up: keep one of them"
        )
    args.consumed_train_samples = 0
    args.skipped_train_samples = 0
    args.consumed_valid_samples = 0
    args.variable_seq_lengths = False


def check_schedule(args: argparse.Namespace) -> None:
    """Learning rate and weight decay; sets `start_weight_decay` and `end_weight_decay`."""
    if args.lr is None and not args.skip_train:
        raise UsageError("missing --lr: the largest learning rate, as 1e-3")
    if args.lr is not None and not args.min_lr <= args.lr:
        raise UsageError(f"--min-lr {args.min_lr} is above --lr {args.lr}: lower it")
    if args.lr is not None and args.lr_warmup_init > args.lr:
        raise UsageError(
            f"--lr-warmup-init {args.lr_warmup_init} is above --lr {args.lr}: lower it"
        )
    _check_warmup(args)
    ends = (args.start_weight_decay, args.end_weight_decay)
    if args.weight_decay_incr_style == "constant":
        if ends not in ((None, None), (args.weight_decay, args.weight_decay)):
            raise UsageError(
                "--start-weight-decay and --end-weight-decay need --weight-decay-incr-style linear "
                "or cosine, given constant"
            )
        args.start_weight_decay = args.end_weight_decay = args.weight_decay
    elif None in ends:
        raise UsageError(
            f"--weight-decay-incr-style {args.weight_decay_incr_style} needs --start-weight-decay "
            "and --end-weight-decay"
        )
    if args.no_weight_decay_cond_type is not None:
        args.apply_wd_to_qk_layernorm = True
        args.no_weight_decay_cond_type = None
    if args.override_opt_param_scheduler and args.use_checkpoint_opt_param_scheduler:
        raise UsageError(
            "--override-opt_param-scheduler and --use-checkpoint-opt_param-scheduler say opposite "
            "things: keep one of them"
        )


def _check_warmup(args: argparse.Namespace) -> None:
    fraction = args.lr_warmup_fraction
    if fraction is not None and not 0 <= fraction < 1:
        raise UsageError(f"--lr-warmup-fraction {fraction}: must be at least 0 and below 1")
    unit = "iters" if args.train_iters is not None else "samples"
    decay = getattr(args, f"lr_decay_{unit}") or getattr(args, f"train_{unit}")
    warmup = getattr(args, f"lr_warmup_{unit}")
    if not 0 <= warmup < decay:
        raise UsageError(
            f"--lr-warmup-{unit} {warmup} must be at least 0 and below the {decay} {unit} that the "
            f"learning rate decays over (--lr-decay-{unit} or --train-{unit})"
        )
    if args.lr_decay_style == "WSD" and getattr(args, f"lr_wsd_decay_{unit}") is None:
        raise UsageError(
            f"--lr-decay-style WSD needs --lr-wsd-decay-{unit}, at most {decay - warmup}"
        )


def check_precision(args: argparse.Namespace) -> None:
    """Number formats; sets `params_dtype` and how gradients are kept."""
    for name in ("main_grads_dtype", "main_params_dtype", "exp_avg_dtype", "exp_avg_sq_dtype"):
        given = getattr(args, name)
        setattr(args, name, given if isinstance(given, torch.dtype) else DTYPES[given])
        if getattr(args, name) != torch.float32 and not args.use_precision_aware_optimizer:
            raise UsageError(
                f"--{name.replace('_', '-')} {given} needs --use-precision-aware-optimizer"
            )
    if args.fp16 and args.bf16:
        raise UsageError("--fp16 and --bf16 exclude each other: keep one of them")
    args.params_dtype = torch.float32
    if args.fp16:
        args.params_dtype = torch.float16
        if not args.loss_scale:
            # An overflow is how the dynamic loss scale is found, so it must not stop the run.
            args.check_for_nan_in_loss_and_grad = False
    if args.bf16:
        args.params_dtype = torch.bfloat16
        _choose_gradient_precision(args)
    if args.fp16_lm_cross_entropy and not args.fp16:
        raise UsageError("--fp16-lm-cross-entropy needs --fp16")
    if args.fp32_residual_connection and not (args.fp16 or args.bf16):
        raise UsageError("--fp32-residual-connection needs --fp16 or --bf16")
    if args.grad_reduce_in_bf16 and not args.bf16:
        raise UsageError("--grad-reduce-in-bf16 needs --bf16")
    if args.apply_query_key_layer_scaling:
        args.attention_softmax_in_fp32 = True


def _choose_gradient_precision(args: argparse.Namespace) -> None:
    if args.grad_reduce_in_bf16:
        args.accumulate_allreduce_grads_in_fp32 = False
    elif args.main_grads_dtype == torch.float32:
        args.accumulate_allreduce_grads_in_fp32 = True
    elif args.accumulate_allreduce_grads_in_fp32:
        raise UsageError(
            "--accumulate-allreduce-grads-in-fp32 needs --main-grads-dtype fp32, given bf16"
        )


def check_optimizer(args: argparse.Namespace) -> None:
    """The optimizer and its companions."""
    if "muon" in args.optimizer:
        raise UsageError(f"--optimizer {args.optimizer} is not supported: use adam or sgd")
    if args.optimizer == "sgd" and args.use_distributed_optimizer:
        raise UsageError(
            "--optimizer sgd does not go with --use-distributed-optimizer, which shards Adam's "
            "state: leave one of them out"
        )
    if args.use_precision_aware_optimizer:
        if args.optimizer != "adam":
            raise UsageError("--use-precision-aware-optimizer needs --optimizer adam")
        if not args.use_distributed_optimizer:
            raise UsageError("--use-precision-aware-optimizer needs --use-distributed-optimizer")
    if args.ddp_num_buckets is not None:
        if args.ddp_bucket_size is not None:
            raise UsageError("--ddp-num-buckets and --ddp-bucket-size say the same: keep one")
        if args.ddp_num_buckets < 1:
            raise UsageError(f"--ddp-num-buckets {args.ddp_num_buckets}: must be at least 1")


def check_determinism(args: argparse.Namespace, machine: Machine) -> None:
    """With --deterministic-mode, sets torch to deterministic kernels."""
    if not args.deterministic_mode:
        return
    if args.cross_entropy_loss_fusion:
        raise UsageError(
            "--cross-entropy-loss-fusion is not deterministic: leave it or --deterministic-mode out"
        )
    given = os.environ.get("NCCL_ALGO")
    if machine.has_gpu and given not in DETERMINISTIC_ALGORITHMS:
        raise UsageError(
            "--deterministic-mode needs NCCL_ALGO in the environment to be one of "
            f"{', '.join(DETERMINISTIC_ALGORITHMS)}, given {given if given else 'nothing'}"
        )
    torch.use_deterministic_algorithms(True)
