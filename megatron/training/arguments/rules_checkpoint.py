"""Rules about checkpoints."""

from __future__ import annotations

import argparse
from pathlib import Path

from megatron.training.arguments.errors import UsageError


def check_checkpoints(args: argparse.Namespace) -> None:
    """Saving and loading; sets `use_dist_ckpt`, which is always true here."""
    if args.ckpt_format != "torch_dist":
        raise UsageError(
            f"--ckpt-format {args.ckpt_format} is not supported: use torch_dist (the default)"
        )
    args.use_dist_ckpt = True
    if args.save is not None and args.save_interval is None:
        raise UsageError(
            f"--save {args.save} needs --save-interval: iterations between checkpoints"
        )
    for name in ("save_interval", "save_retain_interval", "ckpt_step"):
        given = getattr(args, name)
        if given is not None and given < 1:
            raise UsageError(f"--{name.replace('_', '-')} {given}: must be at least 1")
    retain, interval = args.save_retain_interval, args.save_interval
    if retain is not None and (interval is None or retain % interval):
        raise UsageError(
            f"--save-retain-interval {retain} must be a multiple of --save-interval {interval}"
        )
    if args.save is not None and Path(args.save).is_file():
        raise UsageError(f"--save {args.save} is a file: name a folder")
    needing_load = ("ckpt_step", "use_checkpoint_args", "exit_on_missing_checkpoint", "finetune")
    for name in needing_load:
        if getattr(args, name) and args.load is None:
            raise UsageError(f"--{name.replace('_', '-')} needs --load")
    if not args.perform_initialization and args.load is None:
        raise UsageError("--no-initialization leaves the weights undefined without --load: add it")
    if args.exit_on_missing_checkpoint and not Path(args.load).is_dir():
        raise UsageError(f"--load {args.load}: no such folder, and --exit-on-missing-checkpoint")
    _note_what_has_no_effect(args)


def _note_what_has_no_effect(args: argparse.Namespace) -> None:
    if args.load is not None and not Path(args.load).is_dir():
        args.notes.append(f"--load {args.load}: no such folder, training starts from scratch")
    if args.use_dist_ckpt_deprecated or args.dist_ckpt_format_deprecated:
        args.notes.append("--use-dist-ckpt and --dist-ckpt-format have no effect: torch_dist it is")
    if args.ckpt_fully_parallel_save_deprecated:
        args.notes.append("--ckpt-fully-parallel-save has no effect: it is the default")
    if args.save and args.use_distributed_optimizer and not args.ckpt_fully_parallel_save:
        args.notes.append(
            "--no-ckpt-fully-parallel-save: such a checkpoint resumes with the same parallel sizes "
            "only"
        )
