"""An iteration that fails anywhere, discarded and run again, leaves no trace in the run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import failing_hooks
import pytest
from rank_programs import SMALL

POINTS = [
    "data",
    "forward",
    "inside-forward",
    "last-forward",
    "backward",
    "inside-backward",
    "last-backward",
    "evaluate",
    "before-reduce",
    "after-reduce",
    "optimizer",
    "before-optimizer",
    "after-optimizer",
    "before-scheduler",
    "after-scheduler",
    "inside-evaluation",
    "after-step",
    "save",
]
SPACING = {"bf16-overlap": 2}
"""Iterations from one failure to the next, if not 1. Overlap begins with the second iteration after
a failure: only then are collectives under way in the backward pass."""
EVALUATED_EVERY = 8
"""The iteration of each of the two points in evaluation is divisible by this, for both spacings."""
GRIDS = {
    "fp32": (2, ""),
    "bf16-overlap": (
        2,
        "--bf16 --overlap-grad-reduce --overlap-param-gather --ddp-bucket-size 20000",
    ),
    "fp16": (2, "--fp16 --initial-loss-scale 65536 --min-loss-scale 1"),
    "tp2": (2, "--tensor-model-parallel-size 2 --bf16"),
    "moe-ep2": (
        2,
        "--bf16 --num-experts 4 --expert-model-parallel-size 2 --moe-router-topk 2 "
        "--moe-aux-loss-coeff 0.01 --moe-z-loss-coeff 0.001 --moe-router-enable-expert-bias "
        "--moe-router-score-function sigmoid",
    ),
    "recompute": (
        1,
        "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
    ),
}


@pytest.mark.parametrize("grid", sorted(GRIDS))
def test_iterations_failing_at_every_point_equal_an_unfailed_run(
    grid: str, run_ranks: Any, tmp_path: Path
) -> None:
    world_size, extra = GRIDS[grid]
    points = {(index + 1) * SPACING.get(grid, 1): point for index, point in enumerate(POINTS)}
    last = max(points)
    microbatches = 4
    batch = 2 * microbatches * (1 if "tensor-model" in extra else world_size)
    flags = [
        *SMALL,
        *("--mock-data", "--split", "90,10,0", "--data-cache-path", str(tmp_path / "cache")),
        *extra.split(),
        *("--global-batch-size", str(batch), "--num-layers", "3", "--log-interval", "4"),
        *("--train-iters", str(last + 1), "--eval-iters", "1"),
        *("--eval-interval", str(EVALUATED_EVERY), "--seq-length", "32"),
    ]
    save = ["--save", str(tmp_path / "ck"), "--save-interval", str(last)]

    whole = run_ranks(world_size, failing_hooks.train_failing, flags, {})
    failed = run_ranks(world_size, failing_hooks.train_failing, [*flags, *save], points)

    for whole_rank, failed_rank in zip(whole, failed, strict=True):
        assert failed_rank["left"] == {}
        assert failed_rank["happened"] == POINTS
        assert failed_rank["losses"] == pytest.approx(whole_rank["losses"], abs=0, nan_ok=True)
        assert failed_rank["hash"] == whole_rank["hash"]
        assert failed_rank["state"] == whole_rank["state"]
