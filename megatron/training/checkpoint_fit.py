"""Whether the checkpoint that `--load` names fits the flags, found out before any group is made."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import Any

from megatron.core import dist_checkpointing

from megatron.training import checkpoint_folder
from megatron.training.arguments import UsageError
from megatron.training.output import print_rank_0

SHAPE_FLAGS = {
    "num_layers": "--num-layers",
    "hidden_size": "--hidden-size",
    "ffn_hidden_size": "--ffn-hidden-size",
    "num_attention_heads": "--num-attention-heads",
    "kv_channels": "--kv-channels",
    "position_embedding_type": "--position-embedding-type",
    "normalization": "--normalization",
    "num_experts": "--num-experts",
    "moe_ffn_hidden_size": "--moe-ffn-hidden-size",
    "moe_shared_expert_intermediate_size": "--moe-shared-expert-intermediate-size",
}
"""Attributes that must agree and take a value, with the flag that sets each."""

SWITCHES = {
    "untie_embeddings_and_output_weights": ("--untie-embeddings-and-output-weights", True),
    "swiglu": ("--swiglu", True),
    "add_bias_linear": ("--disable-bias-linear", False),
    "add_qkv_bias": ("--add-qkv-bias", True),
    "qk_layernorm": ("--qk-layernorm", True),
}
"""Attributes that must agree and are switched, with the flag and the value it sets."""


def checkpoint_to_load(args: Namespace) -> tuple[Path, int | str] | None:
    """(folder, iteration or 'release') of the checkpoint to load, None if there is none.

    Raises UsageError for a damaged tracker, for a named checkpoint that is not there, and for a
    missing one when `--exit-on-missing-checkpoint` is given.
    """
    if args.load is None:
        return None
    iteration: int | str | None = args.ckpt_step
    if iteration is None:
        try:
            iteration = checkpoint_folder.latest_iteration(args.load)
        except ValueError as error:
            raise UsageError(f"--load {args.load}: {error}") from error
    if iteration is None:
        if args.exit_on_missing_checkpoint:
            raise UsageError(
                f"--load {args.load}: there is no {checkpoint_folder.TRACKER} in it; give a folder "
                "that holds checkpoints, or leave out --exit-on-missing-checkpoint to start afresh"
            )
        return None
    path = checkpoint_folder.find_checkpoint(args.load, iteration)
    if path is None:
        wanted = checkpoint_folder.checkpoint_path(args.load, iteration)
        raise UsageError(
            f"--load {args.load}: {wanted} is no complete torch_dist checkpoint; "
            f"complete ones: {', '.join(_complete(args.load)) or 'none'}; choose with --ckpt-step"
        )
    return path, iteration


def _complete(root: str) -> list[str]:
    folders = sorted(Path(root).glob("iter_*"))
    return [folder.name for folder in folders if (folder / "metadata.json").is_file()]


def check_fit(args: Namespace) -> None:
    """Raises UsageError naming the flag, what was given and what fits. Needs no process group."""
    found = checkpoint_to_load(args)
    if found is None:
        if args.load is not None:
            print_rank_0(
                f"WARNING: could not find {checkpoint_folder.TRACKER} in {args.load}: "
                "will not load any checkpoint and will start from random weights"
            )
        return
    path, iteration = found
    stored = _stored_args(path)
    if stored is None:
        return
    for name, flag in SHAPE_FLAGS.items():
        _compare(path, flag, getattr(args, name, None), getattr(stored, name, None))
    if args.group_query_attention or getattr(stored, "group_query_attention", False):
        groups = getattr(stored, "num_query_groups", None)
        _compare(path, "--num-query-groups", args.num_query_groups, groups)
    if args.position_embedding_type == "learned_absolute":
        length = getattr(stored, "max_position_embeddings", None)
        _compare(path, "--max-position-embeddings", args.max_position_embeddings, length)
    if same_grid(args, stored):
        rows = getattr(stored, "padded_vocab_size", None)
        _compare(path, "--padded-vocab-size", args.padded_vocab_size, rows)
    for name, (flag, sets) in SWITCHES.items():
        if hasattr(stored, name) and getattr(stored, name) != getattr(args, name, None):
            advice = "give it" if getattr(stored, name) == sets else "leave it out"
            raise UsageError(f"{flag} does not fit the checkpoint {path}: {advice}")
    if not args.finetune and iteration != checkpoint_folder.RELEASE:
        _check_optimizer(args, stored, path)


def _compare(path: Path, flag: str, given: Any, fits: Any) -> None:
    if fits is not None and given != fits:
        raise UsageError(f"{flag}: the flags give {given}, the checkpoint {path} has {fits}")


def _check_optimizer(args: Namespace, stored: Namespace, path: Path) -> None:
    """The optimizer's shards are cut for one tensor and pipeline size."""
    if args.no_load_optim or getattr(stored, "no_save_optim", None):
        return
    if not args.use_distributed_optimizer or same_grid(args, stored):
        return
    raise UsageError(
        f"--tensor-model-parallel-size {args.tensor_model_parallel_size} "
        f"--pipeline-model-parallel-size {args.pipeline_model_parallel_size} were given, the "
        f"optimizer in {path} fits {stored.tensor_model_parallel_size} and "
        f"{stored.pipeline_model_parallel_size}; --no-load-optim loads the weights without it"
    )


def same_grid(args: Namespace, stored: Namespace) -> bool:
    """Whether tensor and pipeline sizes are those the checkpoint was written with."""
    names = ("tensor_model_parallel_size", "pipeline_model_parallel_size")
    return all(getattr(stored, name, 1) == getattr(args, name) for name in names)


def _stored_args(path: Path) -> Namespace | None:
    return dist_checkpointing.load_common_state_dict(str(path)).get("args")
