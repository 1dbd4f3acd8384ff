"""Losses, gradient norms and learning rates that Megatron-LM 0.16.1 itself printed."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import rank_programs

GOLDEN = Path(__file__).resolve().parents[1] / "golden"
RUNS: dict[str, Any] = json.loads((GOLDEN / "megatron_lm_0.16.1.json").read_text())["runs"]
LOSS_TOLERANCE = {"fp32": 1e-5, "half": 1e-4}
GRAD_NORM_TOLERANCE = 2e-3
LINE = re.compile(
    r"iteration +(\d+)/ +\d+ \|.* learning rate: (\S+) \|.* lm loss: (\S+) \|.* grad norm: (\S+) \|"
)


@pytest.mark.parametrize("name", sorted(RUNS))
def test_training_with_megatron_lm_flags_prints_its_losses(
    name: str, run_ranks: Any, tmp_path: Path
) -> None:
    golden = RUNS[name]
    for suffix in (".bin", ".idx"):
        shutil.copy(GOLDEN / f"licenses_bytes{suffix}", tmp_path / f"data{suffix}")
    flags = [str(tmp_path / "data") if flag == "DATA" else flag for flag in golden["flags"]]
    flags += ["--num-workers", "0", "--data-cache-path", str(tmp_path / "cache")]

    results = run_ranks(golden["world_size"], rank_programs.train, flags, output=True)

    printed = [match.groups() for match in LINE.finditer(results[-1][1])]
    assert [int(line[0]) for line in printed] == [row["iteration"] for row in golden["iterations"]]
    kind = "half" if {"--bf16", "--fp16"} & set(flags) else "fp32"
    for (_, lr, loss, norm), row in zip(printed, golden["iterations"], strict=True):
        assert float(lr) == row["lr"]
        assert float(loss) == pytest.approx(row["lm_loss"], rel=LOSS_TOLERANCE[kind])
        assert float(norm) == pytest.approx(row["grad_norm"], rel=GRAD_NORM_TOLERANCE)
