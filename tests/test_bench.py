"""The benchmarks' arithmetic against closed forms, what they refuse, and one tiny run."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tools import bench_overhead, bench_transport
from tools.bench_measure import (
    format_size,
    median_ratio,
    parse_size,
    percentile,
    process_cpu_s,
    table,
)
from tools.bench_overhead import (
    PLAIN,
    BenchError,
    Run,
    compare,
    guardian_cpu_s,
    order,
    parse_layout,
    parse_model,
    read_run,
    split_blocks,
    split_extra,
)

# Estimates


def test_percentile_is_linear_between_neighbours() -> None:
    assert [percentile([4, 1, 3, 2, 5], q) for q in (0, 10, 50, 100)] == [1, 1.4, 3, 5]
    assert percentile([7], 95) == 7


def test_median_ratio_of_a_constant_factor_is_exact() -> None:
    plain = [[0.1, 0.5, 0.2], [1.0, 3.0, 2.0]]
    pairs = [([1.25 * s for s in run], run) for run in plain]
    assert median_ratio(pairs) == pytest.approx((1.25, 1.25, 1.25))


def test_median_ratio_pairs_iterations_of_the_same_number() -> None:
    """Iterations differ tenfold, each is 2 % slower: unpaired, the spread would hide it."""
    plain = [float(10**k) for k in range(5)]
    assert median_ratio([([1.02 * s for s in plain], plain)])[0] == pytest.approx(1.02)


def test_median_ratio_interval_spans_runs_that_disagree() -> None:
    """Two pairs, all iterations of one at 1, of the other at 2: a quarter of the resamples of
    pairs holds the first alone, another the second alone."""
    pairs = [([1.0] * 9, [1.0] * 9), ([2.0] * 9, [1.0] * 9)]
    assert median_ratio(pairs) == (1.5, 1.0, 2.0)


def test_median_ratio_is_the_same_every_time() -> None:
    pairs = [([1.0, 1.1, 1.3, 0.9], [1.0, 1.0, 1.1, 1.2])]
    assert median_ratio(pairs) == median_ratio(pairs)
    assert median_ratio(pairs, seed=2)[0] == median_ratio(pairs)[0]


@pytest.mark.parametrize("pairs", [[], [([1.0], [1.0, 2.0])], [([], [])]])
def test_median_ratio_refuses_what_does_not_pair(pairs: list[Any]) -> None:
    with pytest.raises(ValueError, match="pair"):
        median_ratio(pairs)


def test_sizes_are_read_and_shown() -> None:
    texts = ["4096", "1MiB", "64M", "2 GiB", "3kb"]
    assert [parse_size(text) for text in texts] == [4096, 1 << 20, 64 << 20, 2 << 30, 3072]
    assert [format_size(n) for n in (512, 1536, 1 << 30)] == ["512 B", "1.5 KiB", "1 GiB"]
    for text in ("", "0", "-1", "1.5MiB", "MiB", "1TiB"):
        with pytest.raises(ValueError, match="no size"):
            parse_size(text)


def test_table_aligns_columns() -> None:
    assert table(["a", "bb"], [["x", "1"], ["yy", "10"]]) == "a   bb\n--  --\nx    1\nyy  10"


def test_cpu_clock_of_a_process_is_its_own() -> None:
    before = process_cpu_s(os.getpid())
    assert before <= time.process_time() <= process_cpu_s(os.getpid())
    ended = os.posix_spawn(sys.executable, [sys.executable, "-S", "-c", ""], os.environ)
    os.waitpid(ended, 0)
    with pytest.raises(OSError):
        process_cpu_s(ended)


# bench_overhead


def test_order_is_abba_and_mirrors_every_second_round() -> None:
    assert [side for _, side in order(4, ["A", "B"])] == list("ABBAABBA")
    assert list(order(2, "ABC")) == [*((0, s) for s in "ABC"), *((1, s) for s in "CBA")]


def test_grids_and_models_are_read() -> None:
    layouts = [parse_layout(text) for text in ("dp2", "pp2-dp2", "tp2/dp1", "pp2")]
    assert [(x.name, x.num_nodes, x.ranks_per_node) for x in layouts] == [
        ("dp2", 2, 1),
        ("pp2-dp2", 2, 2),
        ("tp2", 2, 1),
        ("pp2", 2, 1),
    ]
    model = parse_model("8x384x6x16384")
    assert dataclass_sizes(model) == dataclass_sizes(parse_model("20M"))


def dataclass_sizes(model: bench_overhead.Model) -> tuple[int, ...]:
    return model.num_layers, model.hidden_size, model.num_heads, model.vocab_size


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--models 21M", "give tiny, 20M"),
        ("--models 2x30x4x100", "do not divide"),
        ("--grids dp1", "no neighbour"),
        ("--grids 2x2", "the form is"),
        ("--pairs 0", "--pairs 0: at least 1"),
        ("--iterations 4 --warm-up 3", "--iterations 5 or more"),
        ("--variants half", "invalid choice"),
    ],
)
def test_overhead_refuses_what_does_not_fit(
    flags: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        bench_overhead.main(flags.split())
    assert ended.value.code == 2
    assert words in capsys.readouterr().err


def test_pinning_needs_a_second_core(monkeypatch: pytest.MonkeyPatch) -> None:
    args = bench_overhead.build_parser().parse_args(["--pin"])
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {5, 1, 3})
    settings = bench_overhead.checked_settings(args, [])
    assert (settings.trainer_cores, settings.guardian_cores) == ((1, 3), (5,))
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0})
    with pytest.raises(ValueError, match="one core"):
        bench_overhead.checked_settings(args, [])


def test_flags_behind_two_dashes_go_to_the_trainings() -> None:
    assert split_extra(["--pairs", "1", "--", "--bf16"]) == (["--pairs", "1"], ["--bf16"])
    assert split_extra(["--pin"]) == (["--pin"], [])


def leave(folder: Path, slot: int, ends: list[float], **changes: Any) -> None:
    """What a trainer writes; CPU time is a tenth of the wall time, delays a hundredth."""
    rows = [
        {"end": end, "cpu": end / 10, "delay": end / 100, "stall": 0.01 * slot}
        | {"capture": 0.1, "seal": 0.2, "losses": {"lm loss": f"{k}"} if slot else {}}
        for k, end in enumerate(ends)
    ]
    record = {"slot": slot, "rows": rows, "memory_bytes": 100, "snapshot_bytes": 10}
    (folder / f"slot{slot}.json").write_text(json.dumps({**record, "num_parameters": 7, **changes}))


def test_a_run_is_read_from_its_slowest_slot(tmp_path: Path) -> None:
    leave(tmp_path, 0, [1.0, 2.0, 4.0, 5.0])
    leave(tmp_path, 1, [1.0, 3.0, 3.5, 6.0])
    puts = [
        {"iteration": i, "cpu": 0.5 * i, "bytes": 10**9, "begin": i, "end": i + 0.5}
        for i in range(4)
    ]
    for number in range(2):
        record = {"rows": puts, "memory_bytes": 50}
        (tmp_path / f"guardian{number}.json").write_text(json.dumps(record))
    run = read_run(tmp_path, "full", 1.5, warm_up=2)
    assert run.iteration_s == [1.0, 2.0]
    assert run.trainers_cpu_s == pytest.approx((0.3 + 0.3) / 2)
    assert run.delay_s == pytest.approx(0.03 / 2)
    assert run.guardians_cpu_s == pytest.approx(1.0)
    assert run.capture_s == pytest.approx(0.3)
    assert run.stall_s == pytest.approx(0.01)
    assert run.replica_gb_per_s == pytest.approx(2.0)
    assert (run.snapshot_bytes, run.trainers_bytes, run.guardians_bytes) == (20, 200, 100)
    assert [row["lm loss"] for row in run.losses] == list("0123")


def test_a_run_without_its_guardians_figures_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BenchError, match="0 slots"):
        read_run(tmp_path, PLAIN, 0.0, warm_up=1)
    leave(tmp_path, 0, [1.0, 2.0, 3.0])
    assert read_run(tmp_path, PLAIN, 0.0, warm_up=1).iteration_s == [1.0, 1.0]
    with pytest.raises(BenchError, match="0 guardians"):
        read_run(tmp_path, "full", 0.0, warm_up=1)


def test_blocks_of_an_alternating_run_pair_without_their_first_iterations() -> None:
    # After a warm-up of 2: iterations 3 and 4 end the first block, with snapshots.
    seconds = [float(i) for i in range(3, 21)]
    with_, without = split_blocks(seconds, warm_up=2)
    assert with_ == [3, 4, 10, 11, 12, 18]
    assert without == [6, 7, 8, 14, 15, 16]


def test_guardians_cpu_is_counted_between_puts() -> None:
    puts = [{"iteration": i, "cpu": float(i * i)} for i in range(6)]
    assert guardian_cpu_s(puts, warm_up=2) == pytest.approx((25 - 4) / 3)
    assert guardian_cpu_s(puts[:1], warm_up=0) == 0.0


def some_run(side: str, factor: float, loss: str = "0x1p+0") -> Run:
    return Run(
        side=side,
        load=0.0,
        iteration_s=[factor, 2 * factor],
        trainers_cpu_s=2 * factor,
        guardians_cpu_s=0.0 if side == PLAIN else 0.25,
        delay_s=0.0,
        capture_s=0.0,
        stall_s=0.0,
        snapshot_bytes=0,
        replica_gb_per_s=0.0,
        trainers_bytes=100,
        guardians_bytes=10,
        num_parameters=1,
        losses=[{"lm loss": loss}],
    )


def test_compare_pairs_rounds_and_adds_up_cpu() -> None:
    plain, full = [some_run(PLAIN, 1.0)] * 2, [some_run("full", 1.5)] * 2
    result = compare("m", "g", plain, full, warm_up=1)
    assert (result.ratio, result.low, result.high) == (1.5, 1.5, 1.5)
    assert (result.plain_s, result.with_s) == (1.5, 2.25)
    assert result.added_cpu_s == pytest.approx(3.25 - 2.0)
    assert "1.500" in bench_overhead.show([result])


def test_compare_refuses_other_losses() -> None:
    with pytest.raises(BenchError, match="losses of full"):
        compare("m", "g", [some_run(PLAIN, 1.0)], [some_run("full", 1.0, "0x1p+1")], warm_up=1)


# bench_transport


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--sizes 1 2x", "no size"),
        ("--sizes 1000000GiB", "give smaller sizes"),
        ("--methods carrier-pigeon", "invalid choice"),
    ],
)
def test_transport_refuses_what_does_not_fit(
    flags: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        bench_transport.main(flags.split())
    assert ended.value.code == 2
    assert words in capsys.readouterr().err


def test_rounds_for_a_size_are_bounded() -> None:
    assert [bench_transport.num_rounds_for(n, 1000) for n in (1, 10, 999)] == [200, 100, 3]


def test_transport_measures_every_method_at_one_mebibyte(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "figures.json"
    assert bench_transport.main(f"--sizes 1MiB --total 4MiB --json {file}".split()) == 0
    figures = json.loads(file.read_text())["figures"]
    methods = list(bench_transport.METHODS)
    if isinstance(bench_transport.LAUNCHER, str):
        methods.remove("mpi")
    assert [f["method"].split()[0] for f in figures] == methods
    for figure in figures:
        assert figure["num_bytes"] == 1 << 20 and figure["num_rounds"] == 4
        assert figure["seconds"] > 0 and figure["sender_s"] > 0
        alone = figure["method"] in ("memcpy", "verify")
        assert (figure["receiver_s"] > 0) == (not alone)
    shown = capsys.readouterr().out
    assert "load average" in shown and "checksums take" in shown


def test_shown_cpu_seconds_are_per_gigabyte() -> None:
    figure = bench_transport.Figure(
        method="replica",
        num_bytes=500_000_000,
        num_rounds=3,
        seconds=0.25,
        sender_s=0.1,
        receiver_s=0.2,
    )
    assert figure.gigabytes_per_s == pytest.approx(2.0)
    assert figure.per_gigabyte(figure.receiver_s) == pytest.approx(0.4)
    bare = bench_transport.Figure(
        **{**{f: getattr(figure, f) for f in figure.__slots__}, "method": "no-checksum"}
    )
    assert "checksums take 0 %" in bench_transport.checksum_share([figure, bare])[0]
