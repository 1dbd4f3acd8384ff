"""What both benchmarks share: robust estimates, CPU clocks of other processes, tables."""

from __future__ import annotations

import ctypes
import datetime
import os
import platform
import random
import statistics
import time
from collections.abc import Sequence
from typing import Any


def median_ratio(
    pairs: Sequence[tuple[Sequence[float], Sequence[float]]],
    *,
    confidence: float = 0.95,
    num_resamples: int = 2000,
    seed: int = 1,
) -> tuple[float, float, float]:
    """Median of with / without over all paired iterations, and the bounds of its interval.

    pairs: (with, without) of each pair of runs; item i of both is the same iteration. The interval
    is a percentile bootstrap that draws pairs of runs, then iterations within them: iterations of
    one run share the machine's mood and are not independent. Raises ValueError for unequal or no
    iterations.
    """
    ratios = []
    for treated, plain in pairs:
        if len(treated) != len(plain) or not treated:
            raise ValueError(f"{len(treated)} and {len(plain)} iterations do not pair")
        ratios.append([a / b for a, b in zip(treated, plain, strict=True)])
    if not ratios:
        raise ValueError("no pairs")
    middle = statistics.median(r for run in ratios for r in run)
    draw = random.Random(seed)
    found = []
    for _ in range(num_resamples):
        runs = draw.choices(ratios, k=len(ratios))
        found.append(statistics.median(r for run in runs for r in draw.choices(run, k=len(run))))
    edge = 100 * (1 - confidence) / 2
    return middle, percentile(found, edge), percentile(found, 100 - edge)


def percentile(values: Sequence[float], q: float) -> float:
    """Linear between neighbours; q from 0 to 100."""
    ordered = sorted(values)
    place = (len(ordered) - 1) * q / 100
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def process_cpu_s(pid: int) -> float:
    """CPU seconds, user and system, of all threads of a live process (clock_getcpuclockid(3))."""
    clock = ctypes.c_int()
    error = ctypes.CDLL(None).clock_getcpuclockid(pid, ctypes.byref(clock))
    if error:
        raise OSError(error, os.strerror(error))
    return time.clock_gettime(clock.value)


_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


def parse_size(text: str) -> int:
    """Bytes of `1MiB`, `64M`, `4096`. Raises ValueError."""
    number = text.strip().upper().removesuffix("IB").removesuffix("B")
    unit = number[-1:] if number[-1:] in ("K", "M", "G") else ""
    digits = number.removesuffix(unit).rstrip()
    if not digits.isdecimal() or int(digits) < 1:
        raise ValueError(f"{text!r} is no size: give bytes, or a number with KiB, MiB or GiB")
    return int(digits) * _UNITS[unit]


def format_size(num_bytes: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if num_bytes < 1024:
            return f"{num_bytes:.4g} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.4g} GiB"


def machine() -> dict[str, Any]:
    """What a figure depends on, and when it was taken."""
    return {
        "cores": len(os.sched_getaffinity(0)),
        "architecture": platform.machine(),
        "python": platform.python_version(),
        "kernel": platform.release(),
        "load": [round(x, 2) for x in os.getloadavg()],
        "utc": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M"),
    }


def machine_line(facts: dict[str, Any]) -> str:
    return (
        f"{facts['utc']} UTC, {facts['cores']} cores {facts['architecture']}, Linux "
        f"{facts['kernel']}, Python {facts['python']}, load average "
        f"{' '.join(f'{x:.2f}' for x in facts['load'])}"
    )


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns as wide as they must be; the first to the left, others to the right."""
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    lines = [header, ["-" * width for width in widths], *rows]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if column else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        )
        for line in lines
    )
