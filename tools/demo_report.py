"""Reads what two runs of the demonstration wrote, and says whether they are the same in every bit.

Reads the JSON lines that `--deadpool-log-dir` collects (docs/log-files.md).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

LOSS = "lm loss"
STAGES = ("detect", "abort", "agree", "setup", "regroup", "restore", "verify", "first_step")


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """One completed iteration; of an iteration run again, the last time."""

    value: float
    bits: str
    """The value as `float.hex` writes it."""
    epoch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Swap:
    """A node lost and replaced."""

    epoch: int
    nodes_lost: tuple[int, ...]
    spares_used: tuple[int, ...]
    restored_iteration: int
    iterations_rerun: int
    seconds: dict[str, float]
    num_bytes: int
    gigabytes_per_s: float

    def __str__(self) -> str:
        stages = ", ".join(f"{s} {self.seconds[s]:.3f}" for s in STAGES if s in self.seconds)
        return (
            f"epoch {self.epoch}: node {_numbers(self.nodes_lost)} lost, spare node "
            f"{_numbers(self.spares_used)} took its place; back at iteration "
            f"{self.restored_iteration}, {self.iterations_rerun} run again; "
            f"{self.num_bytes} bytes at {self.gigabytes_per_s:.2f} GB/s; "
            f"{self.seconds['total']:.3f} s in all ({stages})"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Kill:
    """A node killed on purpose."""

    node: int
    iteration: int
    phase: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRecord:
    """What a run left behind, complete or not."""

    losses: dict[int, Loss]
    """By iteration, in order."""
    kills: tuple[Kill, ...]
    swaps: tuple[Swap, ...]
    hashes: dict[int, str]
    """Of the final parameters, by slot."""


def _numbers(numbers: Sequence[int]) -> str:
    return " and ".join(map(str, numbers))


def _json_lines(file: Path) -> list[dict[str, Any]]:
    """Every complete line: the last one may still be on its way."""
    if not file.exists():
        return []
    *lines, _ = file.read_text(encoding="utf-8").split("\n")
    return [json.loads(line) for line in lines]


def read_run(log_dir: Path) -> RunRecord:
    """May be called while the run goes on."""
    losses = {
        record["iteration"]: Loss(
            value=record["losses"][LOSS], bits=record["hex"][LOSS], epoch=record["epoch"]
        )
        for record in _json_lines(log_dir / "losses.jsonl")
    }
    swaps = (
        Swap(
            epoch=record["epoch"],
            nodes_lost=tuple(record["nodes_lost"]),
            spares_used=tuple(record["spares_used"]),
            restored_iteration=record["restored_iteration"],
            iterations_rerun=record["iterations_rerun"],
            seconds=record["seconds"],
            num_bytes=record["num_bytes"],
            gigabytes_per_s=record["gigabytes_per_s"],
        )
        for record in _json_lines(log_dir / "events.jsonl")
        if record["event"] == "swap"
    )
    kills = (
        Kill(node=record["node"], iteration=record["iteration"], phase=record["phase"])
        for record in _json_lines(log_dir / "injections.jsonl")
    )
    final = _json_lines(log_dir / "final.jsonl")
    return RunRecord(
        losses=dict(sorted(losses.items())),
        kills=tuple(dict.fromkeys(kills)),
        swaps=tuple(swaps),
        hashes={record["slot"]: record["parameters_xxh3"] for record in final},
    )


def differences(
    peace: RunRecord, failure: RunRecord, *, num_iterations: int, num_slots: int
) -> list[str]:
    """Everything that keeps the two runs from being one and the same; empty if they are."""
    found = []
    if peace.swaps:
        found.append("a node was swapped in the run that nothing should have happened to")
    if not failure.swaps:
        found.append("no node was swapped in the run with the failure")
    for name, run in (("in peace", peace), ("with the failure", failure)):
        absent = sorted(set(range(1, num_iterations + 1)) - set(run.losses))
        if absent:
            found.append(f"{name}: no loss of iteration {_numbers(absent)}")
        missing = sorted(set(range(num_slots)) - set(run.hashes))
        if missing:
            found.append(f"{name}: no final parameters of slot {_numbers(missing)}")
    for iteration in sorted(set(peace.losses) & set(failure.losses)):
        one, other = peace.losses[iteration].bits, failure.losses[iteration].bits
        if one != other:
            found.append(f"iteration {iteration}: loss {one} in peace, {other} with the failure")
    for slot in sorted(set(peace.hashes) & set(failure.hashes)):
        one, other = peace.hashes[slot], failure.hashes[slot]
        if one != other:
            found.append(f"slot {slot}: final parameters {one} in peace, {other} with the failure")
    return found


def table(peace: RunRecord, failure: RunRecord, iterations: Sequence[int]) -> str:
    """Losses side by side; rows left out between two `iterations` become one of dots."""
    lines = [
        "iteration    in peace    with failure  epoch  equal",
        "---------  ----------  --------------  -----  -----",
    ]
    before = None
    for iteration in iterations:
        if before is not None and iteration != before + 1:
            lines.append("      ...")
        before = iteration
        one, other = peace.losses.get(iteration), failure.losses.get(iteration)
        equal = "yes" if one and other and one.bits == other.bits else "NO"
        lines.append(
            f"{iteration:>9}  {_decimal(one):>10}  {_decimal(other):>14}  "
            f"{other.epoch if other else '-':>5}  {equal:>5}"
        )
    return "\n".join(lines)


def _decimal(loss: Loss | None) -> str:
    return "-" if loss is None else f"{loss.value:.7f}"


def rows_to_show(peace: RunRecord, failure: RunRecord, num_iterations: int) -> list[int]:
    """First and last iterations, those around each failure, and every one that differs."""
    shown = {1, 2, num_iterations - 1, num_iterations}
    for swap in failure.swaps:
        shown.update(range(swap.restored_iteration - 1, swap.restored_iteration + 2))
    for kill in failure.kills:
        shown.update(range(kill.iteration - 1, kill.iteration + 3))
    for iteration in range(1, num_iterations + 1):
        one, other = peace.losses.get(iteration), failure.losses.get(iteration)
        if one is None or other is None or one.bits != other.bits:
            shown.add(iteration)
    return sorted(shown & set(range(1, num_iterations + 1)))
