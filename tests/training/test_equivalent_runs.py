"""Different ways to compute the same training give the same losses."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import rank_programs
from rank_programs import SMALL

GOLDEN = Path(__file__).resolve().parents[1] / "golden"


@pytest.fixture
def small(tmp_path: Path) -> list[str]:
    """Flags of four iterations on a small data set with its own cache."""
    for suffix in (".bin", ".idx"):
        shutil.copy(GOLDEN / f"licenses_bytes{suffix}", tmp_path / f"data{suffix}")
    return [
        *SMALL,
        *("--data-path", str(tmp_path / "data"), "--split", "70,30,0"),
        *("--data-cache-path", str(tmp_path / "cache"), "--train-iters", "4"),
    ]


def _losses(results: list[Any]) -> list[tuple[int, float]]:
    return results[-1]["losses"]


def test_recompute_with_dropout_gives_the_same_bits(run_ranks: Any, small: list[str]) -> None:
    recompute = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 2"

    plain = run_ranks(1, rank_programs.train, small)
    recomputed = run_ranks(1, rank_programs.train, [*small, *recompute.split()])

    assert recomputed == plain


def test_overlapped_communication_gives_the_same_bits(run_ranks: Any, small: list[str]) -> None:
    # One bucket, as without overlap: other shards would sum the gradient norm in another order.
    overlap = "--overlap-grad-reduce --overlap-param-gather"

    plain = run_ranks(2, rank_programs.train, [*small, "--bf16"])
    overlapped = run_ranks(2, rank_programs.train, [*small, "--bf16", *overlap.split()])

    assert overlapped == plain


def test_two_loader_processes_give_the_same_bits(run_ranks: Any, small: list[str]) -> None:
    plain = run_ranks(1, rank_programs.train, small)
    loaded = run_ranks(1, rank_programs.train, [*small, "--num-workers", "2"])

    assert loaded == plain


def test_interleaved_and_expert_dispatch_agree_with_plain_pipeline(
    run_ranks: Any, small: list[str], tmp_path: Path
) -> None:
    quiet = ["--hidden-dropout", "0", "--attention-dropout", "0"]
    start = ["--save", str(tmp_path / "ck"), "--save-interval", "1", "--exit-interval", "1"]
    load = ["--load", str(tmp_path / "ck"), "--finetune"]
    pipeline = [*small, *quiet, "--pipeline-model-parallel-size", "2"]
    run_ranks(2, rank_programs.train, [*pipeline, *start])

    plain = run_ranks(2, rank_programs.train, [*pipeline, *load])
    interleaved = run_ranks(
        2,
        rank_programs.train,
        [*pipeline, *load, "--num-layers-per-virtual-pipeline-stage", "1"],
    )
    alone = run_ranks(1, rank_programs.train, [*small, *quiet, *load])

    assert [loss for _, loss in _losses(interleaved)] == pytest.approx(
        [loss for _, loss in _losses(plain)], rel=1e-5
    )
    assert [loss for _, loss in _losses(alone)] == pytest.approx(
        [loss for _, loss in _losses(plain)], rel=1e-5
    )


def test_allgather_dispatcher_agrees_with_alltoall(run_ranks: Any, small: list[str]) -> None:
    experts = "--num-experts 4 --expert-model-parallel-size 2 --hidden-dropout 0"
    flags = [*small, *experts.split(), "--attention-dropout", "0"]

    losses = [
        [
            loss
            for _, loss in _losses(
                run_ranks(
                    2, rank_programs.train, [*flags, "--moe-token-dispatcher-type", dispatcher]
                )
            )
        ]
        for dispatcher in ("alltoall", "allgather")
    ]

    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_evaluation_prints_value_and_perplexity(run_ranks: Any, small: list[str]) -> None:
    flags = [*small, "--eval-iters", "1", "--eval-interval", "2"]

    text = run_ranks(2, rank_programs.train, flags, output=True)[1][1]

    found = re.findall(
        r"^ validation loss at (.+?) \| lm loss value: (\S+) \| lm loss PPL: (\S+) \| $",
        text,
        re.MULTILINE,
    )
    assert [line[0] for line in found] == [
        "iteration 2",
        "iteration 4",
        "iteration 4 on validation set",
    ]
    for _, value, perplexity in found:
        assert float(perplexity) == pytest.approx(2.718281828 ** float(value), rel=1e-4)


def test_blend_reads_data_sets_in_the_proportion_of_their_weights(
    run_ranks: Any, small: list[str], tmp_path: Path
) -> None:
    for suffix in (".bin", ".idx"):
        shutil.copy(tmp_path / f"data{suffix}", tmp_path / f"other{suffix}")
    blend = ["--data-path", "3", str(tmp_path / "data"), "1", str(tmp_path / "other")]

    counts = run_ranks(1, rank_programs.blend_counts, [*small, *blend])[0]

    assert counts[0] == pytest.approx(3 * counts[1], abs=1)


def test_exit_signal_saves_and_leaves_on_all_ranks(
    run_ranks: Any, small: list[str], tmp_path: Path
) -> None:
    save = ["--save", str(tmp_path / "ck"), "--save-interval", "100", "--exit-signal-handler"]

    results = run_ranks(2, rank_programs.train_signalled, [*small, *save], 2)

    assert results == [2, 2]
    assert (tmp_path / "ck" / "latest_checkpointed_iteration.txt").read_text() == "2"


def test_train_samples_with_ramp_up_counts_batches(run_ranks: Any, small: list[str]) -> None:
    at = small.index("--train-iters")
    flags = [*small[:at], *small[at + 2 :]]
    for flag in ("--train-iters", "--lr-warmup-iters"):
        while flag in flags:
            at = flags.index(flag)
            del flags[at : at + 2]
    flags += ["--train-samples", "48", "--rampup-batch-size", "4", "4", "24"]

    text = run_ranks(1, rank_programs.train, flags, output=True)[0][1]

    sizes = [int(size) for size in re.findall(r"global batch size: +(\d+)", text)]
    assert sizes == [4, 4, 8, 12, 16]
    assert sum(sizes) <= 48
    assert f"/{len(sizes):8d} |" in text
