"""`python -m deadpool`."""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Sequence

from deadpool.join import add_join_parser
from deadpool.launcher import add_launch_parser


def _log_to_stderr() -> None:
    """DEADPOOL's own warnings, under its name; other libraries keep theirs."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("[deadpool] %(levelname)s %(message)s"))
    logger = logging.getLogger("deadpool")
    logger.addHandler(handler)
    logger.setLevel(logging.WARNING)
    logger.propagate = False


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m deadpool", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    add_launch_parser(commands)
    add_join_parser(commands)
    args = parser.parse_args(argv)
    _log_to_stderr()
    return args.run(args)


if __name__ == "__main__":
    sys.exit(main())
