"""The line per log interval, in Megatron-LM's format, and TensorBoard."""

from __future__ import annotations

import math
from argparse import Namespace
from collections.abc import Mapping
from datetime import datetime
from typing import Any

import torch

from megatron.training.flops import floating_point_operations
from megatron.training.state import TrainState


def open_tensorboard(args: Namespace) -> Any:
    """A TensorBoard writer on the last rank, None elsewhere or without `--tensorboard-dir`."""
    if not args.tensorboard_dir or args.rank != args.world_size - 1:
        return None
    from torch.utils.tensorboard import SummaryWriter

    return SummaryWriter(log_dir=args.tensorboard_dir, max_queue=args.tensorboard_queue_size)


def write_arguments(writer: Any, args: Namespace, iteration: int) -> None:
    """Every flag's value, as text."""
    if writer is not None:
        for name, value in sorted(vars(args).items()):
            writer.add_text(name, str(value), global_step=iteration)


def log_line(
    args: Namespace, state: TrainState, seconds_per_iteration: float, more: Mapping[str, float]
) -> str:
    """Everything of the interval that ends with `state.iteration`. more: figures of the hooks."""
    metrics = state.last_metrics
    batch_size = int(metrics["batch-size"])
    now = datetime.now().strftime("%Y-%m-%d %H:%M:%S.%f")
    fields = [
        f" [{now}] iteration {state.iteration:8d}/{args.train_iters:8d}",
        f"consumed samples: {state.consumed_train_samples:12d}",
    ]
    if state.skipped_train_samples > 0:
        fields.append(f"skipped samples: {state.skipped_train_samples:12d}")
    fields.append(f"elapsed time per iteration (ms): {seconds_per_iteration * 1000.0:.1f}")
    if args.log_throughput:
        throughput = throughput_tflops(args, batch_size, seconds_per_iteration)
        fields.append(f"throughput per GPU (TFLOP/s/GPU): {throughput:.1f}")
    fields.append(f"learning rate: {metrics['learning-rate']:.6E}")
    fields.append(f"global batch size: {batch_size:5d}")
    for name, total in state.interval_losses.items():
        average = total / max(1, state.interval_advanced)
        if average > 0.0:
            fields.append(f"{name}: {average:.6E}")
    fields.append(f"loss scale: {metrics['loss-scale']:.1f}")
    if "grad-norm" in metrics:
        fields.append(f"grad norm: {metrics['grad-norm']:.3f}")
    if "num-zeros" in metrics:
        fields.append(f"num zeros: {int(metrics['num-zeros'])}")
    if "params-norm" in metrics:
        fields.append(f"params norm: {metrics['params-norm']:.3f}")
    fields.append(f"number of skipped iterations: {state.interval_skipped:3d}")
    fields.append(f"number of nan iterations: {state.interval_nan:3d}")
    fields += [f"{name}: {value:.1f}" for name, value in more.items()]
    return " | ".join(fields) + " |"


def throughput_tflops(args: Namespace, batch_size: int, seconds_per_iteration: float) -> float:
    """TFLOP/s per rank."""
    operations = floating_point_operations(args, batch_size)
    return operations / (seconds_per_iteration * 10**12 * args.world_size)


def write_iteration(
    args: Namespace, writer: Any, state: TrainState, losses: dict[str, float]
) -> None:
    """Points of the iteration that just ended, under Megatron-LM's tags."""
    if writer is None or state.iteration % args.tensorboard_log_interval != 0:
        return
    metrics = state.last_metrics
    points = {"learning-rate": metrics["learning-rate"], "batch-size": metrics["batch-size"]}
    points.update(losses)
    if args.log_loss_scale_to_tensorboard:
        points["loss-scale"] = metrics["loss-scale"]
    if args.log_world_size_to_tensorboard:
        points["world-size"] = args.world_size
    for name in ("grad-norm", "num-zeros", "params-norm"):
        if name in metrics:
            points[name] = metrics[name]
    for name, value in points.items():
        writer.add_scalar(name, value, state.iteration)
        writer.add_scalar(f"{name} vs samples", value, state.consumed_train_samples)
    if state.skipped_train_samples > 0:
        writer.add_scalar("skipped-train-samples", state.skipped_train_samples, state.iteration)
    if args.log_memory_to_tensorboard:
        _write_memory(writer, state.iteration)


def _write_memory(writer: Any, iteration: int) -> None:
    statistics = torch.cuda.memory_stats()
    for tag, key in (
        ("mem-reserved-bytes", "reserved_bytes.all.current"),
        ("mem-allocated-bytes", "allocated_bytes.all.current"),
        ("mem-max-allocated-bytes", "allocated_bytes.all.peak"),
        ("mem-allocated-count", "allocation.all.current"),
    ):
        writer.add_scalar(tag, statistics.get(key, 0), iteration)


def validation_line(prefix: str, losses: dict[str, float]) -> str:
    """The framed line after an evaluation: value and perplexity of every loss."""
    line = f" validation loss at {prefix} | "
    for name, value in losses.items():
        line += f"{name} value: {value:.6E} | {name} PPL: {perplexity(value):.6E} | "
    rule = "-" * (len(line) + 1)
    return f"{rule}\n{line}\n{rule}"


def perplexity(loss: float) -> float:
    """e to the loss, the exponent capped at 20."""
    return math.exp(min(20.0, loss))
