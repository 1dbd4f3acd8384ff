#!/usr/bin/env python3
"""Run the protocol's cores through seeded random faults and check every invariant.

python tools/simulate_protocol.py --seeds 10000
python tools/simulate_protocol.py --seeds 1 --start 4711 --trace

A seed that breaks something is replayed with a trace, one line an event. Exits with 1 then.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from deadpool.protocol.invariants import Violated
from deadpool.simulation.schedule import run_seed, summarize


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--seeds", type=int, default=1000, help="how many")
    parser.add_argument("--start", type=int, default=0, help="the first")
    parser.add_argument("--nodes", type=int, help="nodes with slots; from 2 to 4 by seed if absent")
    parser.add_argument("--trace", action="store_true", help="print every event of every seed")
    parser.add_argument("--most-failures", type=int, default=1, help="go on until so many")
    parser.add_argument(
        "--lines", type=int, default=400, help="of a failing seed's trace, its last"
    )
    args = parser.parse_args()

    ends: Counter[str] = Counter()
    failures: list[int] = []
    num_events = 0
    started = told = time.monotonic()
    for seed in range(args.start, args.start + args.seeds):
        try:
            outcome = run_seed(seed, num_nodes=args.nodes, trace=print if args.trace else None)
        except (Violated, AssertionError, LookupError) as error:
            failures.append(seed)
            print(f"seed {seed}: {type(error).__name__}: {error}", flush=True)
            if not args.trace and len(failures) == 1:
                replay(seed, args.nodes, args.lines)
            if len(failures) >= args.most_failures:
                break
            continue
        ends[outcome.kind] += 1
        num_events += outcome.num_events
        if time.monotonic() - told > 10:
            told = time.monotonic()
            done = seed + 1 - args.start
            rate = done / (told - started)
            print(
                f"{done} of {args.seeds} schedules, {rate:.0f}/s, {num_events} events, "
                f"{len(failures)} failures; exit codes: {summarize(ends)}",
                flush=True,
            )
    done = sum(ends.values()) + len(failures)
    seconds = time.monotonic() - started
    print(
        f"{done} schedules in {seconds:.1f} s, {num_events} events, failing seeds: "
        f"{failures or 'none'}; exit codes: {summarize(ends)}"
    )
    return 1 if failures else 0


def replay(seed: int, num_nodes: int | None, num_lines: int) -> None:
    lines: list[str] = []
    try:
        run_seed(seed, num_nodes=num_nodes, trace=lines.append)
    except (Violated, AssertionError, LookupError) as error:
        lines.append(f"{type(error).__name__}: {error}")
    print("\n".join(lines[:1] + lines[1:][-num_lines:]), flush=True)


if __name__ == "__main__":
    sys.exit(main())
