"""The one exception for bad command lines, and the one way out of the process for it."""

from __future__ import annotations

import sys
from typing import NoReturn

EXIT_CODE = 2
"""What argparse uses for a bad command line; every `UsageError` ends the process with it."""


class UsageError(Exception):
    """The command line cannot work: the text names the flag, what was given and what fits.

    Every rank raises it from the same flags, before any process group exists.
    """


def exit_with_usage_error(error: Exception, rank: int) -> NoReturn:
    """Print `error` to stderr on rank 0 alone and leave with exit code 2 on every rank."""
    if rank == 0:
        sys.stderr.write(f"error: {error}\n")
    raise SystemExit(EXIT_CODE)
