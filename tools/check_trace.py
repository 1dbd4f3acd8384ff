"""Check the protocol's traces of a job: `python tools/check_trace.py DIR | FILE...`.

DIR: a --deadpool-log-dir written with --deadpool-trace. Exit code 0 and one line when every
guardian's core repeats itself and all agree; 1 and the violations otherwise; 2 for no traces.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from deadpool.conformance import check, load
from deadpool.pace import most_iterations_rerun
from deadpool.trace import NoTrace

MAX_SHOWN = 20
"""Violations; the first is the one to look at."""


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description="Replay the guardians' traces of one job and compare them with each other."
    )
    parser.add_argument("paths", nargs="+", metavar="DIR|FILE", help="of --deadpool-trace")
    parser.add_argument(
        "--tails-lost",
        action="store_true",
        help="a host was lost with the last lines of its traces: believe what others say it said",
    )
    parser.add_argument(
        "--snapshot-interval",
        type=int,
        default=1,
        metavar="N",
        help="the longest that the job took (default: %(default)s)",
    )
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    args = build_parser().parse_args(argv)
    try:
        traces = load(args.paths)
    except (NoTrace, OSError) as error:
        print(f"check_trace: {error}", file=sys.stderr)
        return 2
    if not traces:
        print("check_trace: no protocol-*.jsonl there; run with --deadpool-trace", file=sys.stderr)
        return 2
    violations, summary = check(
        traces,
        tails_lost=args.tails_lost,
        most_rerun=most_iterations_rerun(args.snapshot_interval),
    )
    for violation in violations[:MAX_SHOWN]:
        print(violation)
    if violations:
        print(f"{len(violations)} violations in the traces of {len(traces)} guardians")
        return 1
    print(summary)
    return 0


if __name__ == "__main__":
    sys.exit(main())
