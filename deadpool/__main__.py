"""`python -m deadpool`."""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Sequence

from deadpool.launcher import add_launch_parser
from deadpool.lead import add_lead_parser


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m deadpool", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    add_launch_parser(commands)
    add_lead_parser(commands)
    args = parser.parse_args(argv)
    logging.basicConfig(level=logging.WARNING, format="[deadpool] %(levelname)s %(message)s")
    return args.run(args)


if __name__ == "__main__":
    sys.exit(main())
