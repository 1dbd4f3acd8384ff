"""The demonstration's comparison and picture, on runs written by hand."""

from __future__ import annotations

import json
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tools import demo
from tools.demo_plot import draw
from tools.demo_report import RunRecord, differences, read_run, rows_to_show, table

NUM_ITERATIONS = 40
KILL = {"node": 1, "iteration": 20, "phase": "backward", "monotonic_s": 12.5}
SWAP = {
    "event": "swap",
    "epoch": 2,
    "nodes_lost": [1],
    "spares_used": [2],
    "restored_iteration": 18,
    "iterations_rerun": 1,
    "seconds": {"detect": 0.02, "abort": 0.01, "agree": 0.003, "setup": 0.4, "regroup": 0.05,
                "restore": 0.1, "verify": 0.02, "first_step": 0.3, "total": 0.503},
    "num_bytes": 1234567,
    "gigabytes_per_s": 1.5,
}  # fmt: skip


def loss_of(iteration: int) -> float:
    return 2.0 + 3.7 * 0.9**iteration


def line_of(iteration: int, epoch: int = 1, loss: float | None = None) -> dict[str, Any]:
    value = loss_of(iteration) if loss is None else loss
    return {
        "iteration": iteration,
        "epoch": epoch,
        "losses": {"lm loss": value},
        "hex": {"lm loss": value.hex()},
    }


def write_run(
    folder: Path, losses: list[dict[str, Any]], events: list[dict[str, Any]], slots: int = 4
) -> Path:
    folder.mkdir()
    hashes = [
        {"slot": slot, "iteration": NUM_ITERATIONS, "parameters_xxh3": f"{slot:016x}"}
        for slot in range(slots)
    ]
    for name, records in (("losses", losses), ("events", events), ("final", hashes)):
        text = "".join(json.dumps(record) + "\n" for record in records)
        (folder / f"{name}.jsonl").write_text(text)
    return folder


@pytest.fixture
def peace(tmp_path: Path) -> RunRecord:
    lines = [line_of(i) for i in range(1, NUM_ITERATIONS + 1)]
    return read_run(write_run(tmp_path / "peace", lines, []))


@pytest.fixture
def failure(tmp_path: Path) -> RunRecord:
    """Node 1 killed in iteration 20; 19, whose snapshot was not complete everywhere, runs again
    (its first line has another loss, which must not count)."""
    lines = [line_of(i) for i in range(1, 19)] + [line_of(19, loss=9.0)]
    lines += [line_of(i, epoch=2) for i in range(19, NUM_ITERATIONS + 1)]
    folder = write_run(tmp_path / "failure", lines, [{"event": "other"}, SWAP])
    (folder / "injections.jsonl").write_text(json.dumps(KILL) + "\n")
    return read_run(folder)


def compare(peace: RunRecord, failure: RunRecord) -> list[str]:
    return differences(peace, failure, num_iterations=NUM_ITERATIONS, num_slots=4)


def test_equal_runs_last_line_of_an_iteration_counts(peace: RunRecord, failure: RunRecord) -> None:
    assert compare(peace, failure) == []
    assert (failure.losses[18].epoch, failure.losses[19].epoch) == (1, 2)
    assert failure.kills[0].iteration == 20
    assert failure.swaps[0].nodes_lost == (1,)


def test_one_bit_in_a_loss_is_found(peace: RunRecord, tmp_path: Path) -> None:
    bits = struct.unpack("<q", struct.pack("<d", loss_of(33)))[0] + 1
    other = struct.unpack("<d", struct.pack("<q", bits))[0]
    lines = [line_of(i, loss=other if i == 33 else None) for i in range(1, NUM_ITERATIONS + 1)]
    run = read_run(write_run(tmp_path / "run", lines, [SWAP]))
    (found,) = compare(peace, run)
    assert found.startswith("iteration 33: loss 0x1.")
    assert 33 in rows_to_show(peace, run, NUM_ITERATIONS)
    assert "NO" in table(peace, run, [33])


def test_missing_parts_are_found(peace: RunRecord, tmp_path: Path) -> None:
    lines = [line_of(i) for i in range(1, NUM_ITERATIONS)]
    run = read_run(write_run(tmp_path / "run", lines, [], slots=3))
    assert compare(peace, run) == [
        "no node was swapped in the run with the failure",
        "with the failure: no loss of iteration 40",
        "with the failure: no final parameters of slot 3",
    ]


def test_different_final_parameters_are_found(peace: RunRecord, failure: RunRecord) -> None:
    failure.hashes[2] = "f" * 16
    (found,) = compare(peace, failure)
    assert found.startswith("slot 2: final parameters 0000000000000002 in peace")


def test_swap_in_the_peaceful_run_is_found(failure: RunRecord) -> None:
    assert "nothing should have happened" in compare(failure, failure)[0]


def test_unfinished_line_is_left_for_later(tmp_path: Path) -> None:
    complete = json.dumps(line_of(1)) + "\n"
    (tmp_path / "losses.jsonl").write_text(complete + '{"iteration": 2, "los')
    assert list(read_run(tmp_path).losses) == [1]
    assert read_run(tmp_path / "absent").losses == {}


def test_table_shows_both_losses_around_the_swap(peace: RunRecord, failure: RunRecord) -> None:
    rows = rows_to_show(peace, failure, NUM_ITERATIONS)
    assert rows == [1, 2, 17, 18, 19, 20, 21, 22, 39, 40]
    lines = table(peace, failure, rows).splitlines()
    assert lines[4].strip() == "..."
    assert lines[7].split() == ["19", f"{loss_of(19):.7f}", f"{loss_of(19):.7f}", "2", "yes"]


def test_picture_is_drawn(peace: RunRecord, failure: RunRecord, tmp_path: Path) -> None:
    draw(peace, failure, True, tmp_path / "losses.png")
    assert (tmp_path / "losses.png").read_bytes().startswith(b"\x89PNG")


def test_report_says_so_and_returns_what_differs(
    peace: RunRecord, failure: RunRecord, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    args = demo._parse(["--output-dir", str(tmp_path)])
    assert demo.report(peace, failure, args) == []
    printed = capsys.readouterr().out
    assert "the same in every bit" in printed
    assert "epoch 2: node 1 lost, spare node 2 took its place; back at iteration 18" in printed
    failure.hashes[0] = "0" * 15 + "1"
    assert demo.report(peace, failure, args)
    assert "DIFFERENT: slot 0" in capsys.readouterr().out


def test_corpus_is_the_standard_librarys_first_modules() -> None:
    files = demo.corpus_files()
    assert files == sorted(files)
    assert 1_000_000 < sum(file.stat().st_size for file in files) <= demo.CORPUS_BYTES


def test_training_command_has_no_flag_twice(tmp_path: Path) -> None:
    args = demo._parse(["--output-dir", str(tmp_path / "with space")])
    command = demo.training_command(tmp_path, tmp_path / "with space", args, "kill")
    flags = [word for word in command if word.startswith("--")]
    assert len(flags) == len(set(flags))
    assert str(tmp_path / "with space") in command


@pytest.mark.timeout(600)
def test_demo_itself_short_ends_with_0_and_its_files(tmp_path: Path) -> None:
    command = [sys.executable, str(demo.ROOT / "tools" / "demo.py"), "--output-dir", str(tmp_path)]
    command += ["--train-iters", "8", "--kill-iteration", "5", "--time-limit", "240"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "node 1 lost, spare node 2 took its place" in done.stdout
    assert "8 losses and the parameters of 4 slots are the same in every bit" in done.stdout
    assert len((tmp_path / "losses.txt").read_text().splitlines()) == 2 + 8
    assert (tmp_path / "losses.png").stat().st_size > 10_000
