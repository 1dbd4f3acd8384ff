"""Flags of the training loop: batches, duration, schedules, precision, evaluation."""

from __future__ import annotations

import signal

from megatron.training.arguments.flag import Flag, off_switch, switch, value
from megatron.training.arguments.generated import by_name

TRAINING: tuple[Flag, ...] = (
    value("--micro-batch-size", int, None, "samples that one rank computes at a time"),
    value(
        "--global-batch-size",
        int,
        None,
        "samples of one iteration over all ranks; default: one microbatch a data-parallel rank",
    ),
    value(
        "--rampup-batch-size",
        int,
        None,
        "start size, increment, and the number of samples over which the batch grows; "
        "needs --train-samples",
        nargs=3,
    ),
    switch(
        "--decrease-batch-size-if-needed",
        "round the batch down to what divides among the ranks instead of refusing it",
    ),
    value("--train-iters", int, None, "iterations to train for; this or --train-samples"),
    value("--train-samples", int, None, "samples to train for; this or --train-iters"),
    value("--exit-interval", int, None, "leave after an iteration divisible by this"),
    value("--exit-duration-in-mins", int, None, "leave after this many minutes"),
    switch("--exit-signal-handler", "save a checkpoint and leave when --exit-signal arrives"),
    value(
        "--exit-signal",
        by_name(signal.Signals),
        signal.SIGTERM,
        "the signal that --exit-signal-handler listens to",
        choices=tuple(signal.Signals),
    ),
    value(
        "--iterations-to-skip",
        int,
        [],
        "iterations whose batch is read but not trained on",
        nargs="+",
    ),
    switch("--manual-gc", "collect Python's garbage at fixed iterations, on all ranks together"),
    value("--manual-gc-interval", int, 0, "iterations between two such collections"),
    off_switch(
        "--no-manual-gc-eval --disable-manual-gc-eval",
        "manual_gc_eval",
        "do not collect garbage around an evaluation",
    ),
    value(
        "--empty-unused-memory-level",
        int,
        0,
        "return cached device memory: 0 never, 1 after an iteration, 2 also before the optimizer",
        choices=(0, 1, 2),
    ),
    value(
        "--check-weight-hash-across-dp-replicas-interval",
        int,
        None,
        "iterations between two comparisons of parameters over data-parallel ranks",
    ),
    value("--train-sync-interval", int, None, "iterations between two device synchronizations"),
    off_switch(
        "--no-check-for-nan-in-loss-and-grad",
        "check_for_nan_in_loss_and_grad",
        "go on when a loss or gradient is not a number",
    ),
    switch("--recompute-activations", "the same as --recompute-granularity selective"),
)

SCHEDULE: tuple[Flag, ...] = (
    value(
        "--lr-decay-style",
        str,
        "linear",
        "shape of the learning rate after warm-up",
        choices=("constant", "linear", "cosine", "inverse-square-root", "WSD"),
    ),
    value(
        "--lr-wsd-decay-style",
        str,
        "exponential",
        "shape of the last phase of the WSD schedule",
        choices=("exponential", "linear", "cosine", "minus_sqrt"),
    ),
    value("--lr-decay-iters", int, None, "iterations to decay over; default --train-iters"),
    value("--lr-decay-samples", int, None, "samples to decay over; default --train-samples"),
    value("--lr-wsd-decay-iters", int, None, "iterations of the WSD schedule's last phase"),
    value("--lr-wsd-decay-samples", int, None, "samples of the WSD schedule's last phase"),
    value("--lr-warmup-fraction", float, None, "share of the decay period spent warming up"),
    value("--lr-warmup-iters", int, 0, "iterations of linear warm-up"),
    value("--lr-warmup-samples", int, 0, "samples of linear warm-up"),
    value("--lr-warmup-init", float, 0.0, "learning rate that warm-up starts from"),
    switch(
        "--override-opt_param-scheduler --override-opt-param-scheduler",
        "on resuming, this command line's schedule wins over the checkpoint's",
    ),
    switch(
        "--use-checkpoint-opt_param-scheduler --use-checkpoint-opt-param-scheduler",
        "on resuming, the checkpoint's schedule wins over this command line's",
    ),
    value("--start-weight-decay", float, None, "weight decay at the start of its increase"),
    value("--end-weight-decay", float, None, "weight decay at the end of its increase"),
    value(
        "--weight-decay-incr-style",
        str,
        "constant",
        "how weight decay grows from its start to its end",
        choices=("constant", "linear", "cosine"),
    ),
    value(
        "--no-weight-decay-cond-type",
        str,
        None,
        "older spelling of --apply-wd-to-qk-layernorm",
        choices=("apply_wd_to_qk_layernorm",),
    ),
)

PRECISION: tuple[Flag, ...] = (
    switch("--grad-reduce-in-bf16", "keep and reduce gradients in bf16 instead of fp32"),
    switch(
        "--accumulate-allreduce-grads-in-fp32",
        "keep and reduce gradients in fp32; always so with --bf16 unless --grad-reduce-in-bf16",
    ),
    switch("--fp16-lm-cross-entropy", "compute the loss in fp16"),
)

EVALUATION: tuple[Flag, ...] = (
    value("--eval-iters", int, 100, "iterations of one evaluation; 0 for none"),
    value("--eval-interval", int, None, "training iterations between two evaluations"),
    switch("--skip-train", "evaluate and leave"),
)
