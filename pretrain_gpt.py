"""Pretrain a GPT with Megatron-LM's command line.

    torchrun --nproc-per-node 4 pretrain_gpt.py --tensor-model-parallel-size 2 ...

With `--deadpool`, a dead node does not stop it:

    python -m deadpool launch --nodes 3 --spare-nodes 1 pretrain_gpt.py --deadpool ...
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from deadpool import run
from deadpool.config import add_arguments

if TYPE_CHECKING:
    from argparse import Namespace

    from megatron.training.hooks import TrainingHooks

# torch and megatron-core are imported in functions: a guardian runs this script without them.


def read_arguments(argv: Sequence[str]) -> Namespace:
    """Validated flags; ends the process with one message and exit code 2 where they do not fit."""
    from megatron.training.arguments import (
        UsageError,
        exit_with_usage_error,
        parse_args,
        validate_args,
    )

    args = parse_args(list(argv), add_arguments)
    try:
        validate_args(args, int(os.environ.get("WORLD_SIZE", "1")))
    except UsageError as error:
        exit_with_usage_error(error, int(os.environ.get("RANK", "0")))
    return args


def check(argv: Sequence[str]) -> int:
    """Read the flags for a whole machine, before the job forms: do they fit each other, what they
    name, and this machine's memory."""
    from deadpool.integrations.memory import check_memory
    from megatron.training.arguments import UsageError, exit_with_usage_error
    from megatron.training.output import print_line
    from megatron.training.pretrain import check_inputs

    args = read_arguments(argv)
    for note in args.notes:
        print_line(note)
    try:
        check_inputs(args)
        check_memory(args)
    except UsageError as error:
        exit_with_usage_error(error, 0)
    return 0


def train(argv: Sequence[str], hooks: TrainingHooks | None = None) -> int:
    """Run one rank of the job; the exit code."""
    from megatron.training.arguments import UsageError, exit_with_usage_error
    from megatron.training.output import print_rank_0
    from megatron.training.pretrain import destroy_process_groups, pretrain

    args = read_arguments(argv)
    if hooks is None:
        for note in args.notes:
            print_rank_0(note)
    try:
        code = pretrain(args, hooks)
    except UsageError as error:
        exit_with_usage_error(error, int(os.environ.get("RANK", "0")))
    destroy_process_groups()
    return code


def main(argv: Sequence[str]) -> int:
    """One process of the job, whoever started it; the exit code."""
    if "--deadpool" in argv:
        return run.main(argv, train=train, check=check)
    return train(argv)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
