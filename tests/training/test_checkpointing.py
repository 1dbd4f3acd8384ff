"""Checkpoints: a resumed run continues to the bit, an interrupted save harms nothing."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import rank_programs
from rank_programs import SMALL

from megatron.training import checkpoint_folder

GOLDEN = Path(__file__).resolve().parents[1] / "golden"
GRIDS = {
    "pp2-dp2-bf16": "--pipeline-model-parallel-size 2 --bf16",
    "tp2-dp2-fp16": "--tensor-model-parallel-size 2 --fp16 --initial-loss-scale 4096",
    "ep2-dp4-bf16": "--num-experts 4 --expert-model-parallel-size 2 --bf16",
    "dp4-overlap": "--bf16 --overlap-grad-reduce --overlap-param-gather",
    "dp4-plain-optimizer": "--no-use-distributed-optimizer-placeholder",
}


@pytest.fixture
def data(tmp_path: Path) -> list[str]:
    """Flags of a small data set with its own cache."""
    for suffix in (".bin", ".idx"):
        shutil.copy(GOLDEN / f"licenses_bytes{suffix}", tmp_path / f"data{suffix}")
    return [
        *("--data-path", str(tmp_path / "data"), "--split", "70,30,0"),
        *("--data-cache-path", str(tmp_path / "cache")),
    ]


def _flags(grid: str, data: list[str]) -> list[str]:
    flags = [*SMALL, *data, *GRIDS[grid].split()]
    if grid == "dp4-plain-optimizer":
        flags = [f for f in flags if f != "--use-distributed-optimizer" and "placeholder" not in f]
    return flags


@pytest.mark.parametrize("grid", sorted(GRIDS))
def test_resume_from_checkpoint_gives_uninterrupted_losses(
    grid: str, run_ranks: Any, data: list[str], tmp_path: Path
) -> None:
    evaluation = ["--eval-iters", "1", "--eval-interval", "2"]
    flags = [*_flags(grid, data), *evaluation]
    save = ["--save", str(tmp_path / "ck"), "--save-interval", "3"]

    whole = run_ranks(4, rank_programs.train, flags)
    first = run_ranks(4, rank_programs.train, [*flags, *save, "--exit-interval", "3"])
    second = run_ranks(4, rank_programs.train, [*flags, "--load", str(tmp_path / "ck")])

    assert (tmp_path / "ck" / "latest_checkpointed_iteration.txt").read_text() == "3"
    assert any(rank["losses"] for rank in whole)
    for whole_rank, first_rank, second_rank in zip(whole, first, second, strict=True):
        assert first_rank["losses"] + second_rank["losses"] == whole_rank["losses"]
        assert second_rank["hash"] == whole_rank["hash"]


def test_save_killed_before_publication_leaves_last_checkpoint_loadable(
    run_ranks: Any, data: list[str], tmp_path: Path
) -> None:
    root = tmp_path / "ck"
    flags = [*SMALL, *data, "--save", str(root), "--save-interval", "2"]
    whole = run_ranks(1, rank_programs.train, [*SMALL, *data])

    died = run_ranks(1, rank_programs.train_killed_in_save, flags, 4)
    resumed = run_ranks(1, rank_programs.train, [*flags, "--load", str(root)])

    assert died == [True]
    assert resumed[0]["losses"] == whole[0]["losses"][2:]
    assert sorted(p.name for p in root.iterdir()) == [
        "iter_0000002",
        "iter_0000004",
        "iter_0000006",
        "latest_checkpointed_iteration.txt",
    ]


@pytest.mark.parametrize("moment", ["after_aside", "after_rename"])
def test_replacing_a_checkpoint_interrupted_finds_a_complete_one(
    moment: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for text in ("old", "new"):
        checkpoint_folder.prepare_partial(tmp_path, 7)
        folder = checkpoint_folder.partial_path(tmp_path, 7)
        (folder / "metadata.json").write_text(text)
        if text == "old":
            checkpoint_folder.publish(tmp_path, 7)
    renames = []
    rename = Path.rename

    def failing(self: Path, target: Path) -> Path:
        renames.append(target)
        if moment == "after_aside" and len(renames) == 2:
            raise OSError("power cut")
        return rename(self, target)

    def no_tracker(*args: Any) -> None:
        raise OSError("power cut")

    monkeypatch.setattr(Path, "rename", failing)
    if moment == "after_rename":
        monkeypatch.setattr(checkpoint_folder, "_replace_text", no_tracker)
    with pytest.raises(OSError, match="power cut"):
        checkpoint_folder.publish(tmp_path, 7)

    assert checkpoint_folder.latest_iteration(tmp_path) == 7
    found = checkpoint_folder.find_checkpoint(tmp_path, 7)
    assert found is not None
    expected = "old" if moment == "after_aside" else "new"
    assert (found / "metadata.json").read_text() == expected


def test_retain_interval_removes_checkpoints_between(
    run_ranks: Any, data: list[str], tmp_path: Path
) -> None:
    root = tmp_path / "ck"
    save = ["--save", str(root), "--save-interval", "1", "--save-retain-interval", "3"]

    run_ranks(1, rank_programs.train, [*SMALL, *data, *save])

    kept = sorted(path.name for path in root.glob("iter_*"))
    assert kept == ["iter_0000003", "iter_0000006"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("--vocab-size 600", "--padded-vocab-size: the flags give 640, the checkpoint .* has 384"),
        ("--hidden-size 32", "--hidden-size: the flags give 32, the checkpoint .* has 64"),
        ("--num-layers 2", "--num-layers: the flags give 2"),
        ("--swiglu --ffn-hidden-size 256", "--swiglu does not fit the checkpoint .*leave it out"),
        ("--ckpt-step 5", "iter_0000005 is no complete .*complete ones: iter_0000006"),
        ("--load /nowhere --exit-on-missing-checkpoint", "/nowhere"),
    ],
)
def test_checkpoint_that_does_not_fit_is_refused_before_groups(
    change: str, message: str, run_ranks: Any, data: list[str], tmp_path: Path
) -> None:
    root = str(tmp_path / "ck")
    run_ranks(1, rank_programs.train, [*SMALL, *data, "--save", root, "--save-interval", "6"])

    flags = [*SMALL, *data, "--load", root, *change.split()]
    refusal = run_ranks(1, rank_programs.refusal, flags)[0]

    assert refusal["groups"] is False
    assert re.search(message, refusal["message"]), refusal["message"]


def test_finetune_loads_weights_alone(run_ranks: Any, data: list[str], tmp_path: Path) -> None:
    root = str(tmp_path / "ck")
    trained = run_ranks(1, rank_programs.train, [*SMALL, *data, "--save", root,
                                                 "--save-interval", "6"])  # fmt: skip

    flags = [*SMALL, *data, "--load", root, "--finetune", "--lr", "0", "--min-lr", "0"]
    tuned = run_ranks(1, rank_programs.train, flags)

    assert [iteration for iteration, _ in tuned[0]["losses"]] == [1, 2, 3, 4, 5, 6]
    assert tuned[0]["hash"] == trained[0]["hash"]
