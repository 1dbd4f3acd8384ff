"""Lines on the terminal, each from one rank."""

from __future__ import annotations

import os
import sys
from datetime import datetime

import torch


def global_rank() -> int:
    """This process's rank, also before the process groups exist."""
    if torch.distributed.is_initialized():
        return torch.distributed.get_rank()
    return int(os.environ.get("RANK", "0"))


def print_line(message: str) -> None:
    """Write `message` and the end of the line to stdout in one call to the system, so that no line
    of another rank comes between the two (`print` makes two where PYTHONUNBUFFERED is set)."""
    sys.stdout.write(f"{message}\n")
    sys.stdout.flush()


def print_rank_0(message: str) -> None:
    """Print on rank 0 alone."""
    if global_rank() == 0:
        print_line(message)


def print_rank_last(message: str) -> None:
    """Print on the last rank alone: where the loss is known, also with a pipeline."""
    if (
        not torch.distributed.is_initialized()
        or global_rank() == torch.distributed.get_world_size() - 1
    ):
        print_line(message)


def print_datetime(message: str) -> None:
    """Print `message` with the time of day on rank 0."""
    now = datetime.now().strftime("%Y-%m-%d %H:%M:%S.%f")
    print_rank_0(f"[{message}] datetime: {now} ")
