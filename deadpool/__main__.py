"""`python -m deadpool`."""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Sequence

from deadpool.launcher import add_launch_parser


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m deadpool", description=__doc__)
    add_launch_parser(parser.add_subparsers(required=True, metavar="COMMAND"))
    args = parser.parse_args(argv)
    logging.basicConfig(level=logging.WARNING, format="[deadpool] %(levelname)s %(message)s")
    return args.run(args)


if __name__ == "__main__":
    sys.exit(main())
