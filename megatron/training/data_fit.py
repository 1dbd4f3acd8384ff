"""Whether every split gets documents, found out before any process group is made.

megatron-core's GPTDataset looks for ever for tokens in a split without documents.
"""

from __future__ import annotations

import struct
from argparse import Namespace

from megatron.core.datasets.blended_megatron_dataset_config import (
    convert_split_vector_to_split_matrix,
    parse_and_normalize_split,
)

from megatron.training.arguments import UsageError
from megatron.training.data import data_blends

_HEADER = struct.Struct("<9sQBQQ")
"""Magic, version, token type, number of sequences, number of documents."""
_MAGIC = b"MMIDIDX\x00\x00"
_NAMES = ("training", "validation", "test")


def check_splits(args: Namespace) -> None:
    """Raises UsageError naming the split that would be empty, and the data set."""
    blend, blend_per_split = data_blends(args)
    if blend is not None:
        matrix = convert_split_vector_to_split_matrix(parse_and_normalize_split(args.split))
        for prefix in blend[0]:
            count = num_sequences(prefix)
            for name, bounds in zip(_NAMES, matrix, strict=True):
                if bounds is not None and round(bounds[0] * count) == round(bounds[1] * count):
                    raise UsageError(
                        f"--split {args.split} leaves no document of {prefix} for {name}: it has "
                        f"{count}; give that split more, or 0 as in --split 100,0,0"
                    )
    for name, part in zip(_NAMES, blend_per_split or (), strict=False):
        for prefix in part[0] if part is not None else ():
            if num_sequences(prefix) == 0:
                raise UsageError(f"{prefix}, the {name} data, holds no document")


def num_sequences(prefix: str) -> int:
    """How many documents the data set holds. Raises UsageError if its index is not one."""
    with open(f"{prefix}.idx", "rb") as file:
        header = file.read(_HEADER.size)
    if len(header) < _HEADER.size or not header.startswith(_MAGIC):
        raise UsageError(f"{prefix}.idx is no index of tools/preprocess_data.py or Megatron-LM")
    return int(_HEADER.unpack(header)[3])
