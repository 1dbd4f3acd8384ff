"""`--use-checkpoint-args` takes the model's shape from a checkpoint."""

from __future__ import annotations

import json
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.training.arguments import UsageError, parse_args, validate_args
from megatron.training.arguments.machine import Machine

RUN = (
    "--micro-batch-size 1 --train-iters 4 --lr 1e-3 --eval-iters 0 --mock-data --split 99,1,0 "
    "--use-checkpoint-args"
)


def write_checkpoint(root: Path, **stored: Any) -> None:
    """What the flags need of a checkpoint: the tracker, and the arguments in its common state."""
    folder = root / "iter_0000003"
    folder.mkdir()
    (root / "latest_checkpointed_iteration.txt").write_text("3")
    (folder / "metadata.json").write_text(
        json.dumps(
            {
                "sharded_backend": "torch_dist",
                "sharded_backend_version": 1,
                "common_backend": "torch",
                "common_backend_version": 1,
            }
        )
    )
    content = {"args": Namespace(**stored)} if stored else {}
    torch.save(content, folder / "common.pt")


def validated(root: Path, flags: str = "") -> Namespace:
    args = parse_args([*RUN.split(), "--load", str(root), *flags.split()])
    return validate_args(args, 1, Machine(has_gpu=False))


STORED = {
    "num_layers": 2,
    "hidden_size": 32,
    "ffn_hidden_size": 100,
    "num_attention_heads": 4,
    "kv_channels": 8,
    "seq_length": 16,
    "max_position_embeddings": 16,
    "swiglu": True,
    "add_bias_linear": False,
    "group_query_attention": True,
    "num_query_groups": 2,
    "normalization": "RMSNorm",
    "tokenizer_type": "NullTokenizer",
    "vocab_size": 100,
    "num_experts": None,
    "moe_ffn_hidden_size": None,
}


def test_checkpoint_args_give_the_shape_that_was_not_typed(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, **STORED)

    args = validated(tmp_path)

    assert {name: getattr(args, name) for name in STORED} == STORED
    assert any(str(tmp_path) in note for note in args.notes)


def test_checkpoint_args_leave_a_typed_sequence_length_and_the_tokenizer_if_asked(
    tmp_path: Path,
) -> None:
    write_checkpoint(tmp_path, **STORED)

    args = validated(
        tmp_path,
        "--seq-length 8 --tokenizer-type ByteTokenizer "
        "--no-use-tokenizer-model-from-checkpoint-args",
    )

    assert (args.seq_length, args.tokenizer_type) == (8, "ByteTokenizer")
    assert args.hidden_size == 32


def test_checkpoint_without_args_is_refused(tmp_path: Path) -> None:
    write_checkpoint(tmp_path)

    with pytest.raises(UsageError, match="holds no arguments"):
        validated(tmp_path)


def test_no_checkpoint_leaves_the_flags_as_typed(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="missing --num-layers"):
        validated(tmp_path)
