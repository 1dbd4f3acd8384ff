"""Copies of a snapshot are damaged at rest, then a node dies: the damaged copy is not used. What
is left decides: live state, another copy, the iteration before, or the end with exit code 4; losses
are an unfailed run's, bit for bit."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest

from tests.deadpool.job_process import Job

RING = ["--nodes", "4", "--ranks-per-node", "1", "--spare-nodes", "1"]
"""Three slots, data parallel: slot i's replica lies on node i + 1."""
FLAGS = ["--train-iters", "5", "--global-batch-size", "6"]
PAIR = ["--nodes", "3", "--ranks-per-node", "1", "--spare-nodes", "1"]


def damage_said(job: Job) -> list[tuple[int, int, int]]:
    """Node, slot and iteration of each damaged copy, in order."""
    said = re.findall(
        r"deadpool: node (\d+), rank 0 of it: the copy of slot (\d+) at iteration (\d+) in its "
        r"memory is damaged and will not be used: bytes",
        job.output,
    )
    return sorted((int(node), int(slot), int(iteration)) for node, slot, iteration in said)


def inject(*specs: str) -> list[str]:
    return [f"--deadpool-inject={spec}" for spec in specs]


def repairs(job: Job) -> list[int]:
    return [r["restored_iteration"] for r in job.records("events.jsonl")]


@pytest.fixture
def run_damaged(run_job, peace):
    """Iteration 4 does not begin before all copies of iteration 3 are damaged that are to be."""

    def run(launch: list[str], *specs: str) -> tuple[Job, Job]:
        num_flips = sum(spec.startswith("flip") for spec in specs)

        def open_gate(pid: int, log_dir: Path) -> None:
            while not log_dir.exists():
                time.sleep(0.01)
            gate, done = log_dir / "hold4", log_dir / "injections.jsonl"
            gate.touch()
            while not done.exists() or done.read_text().count('"flip"') < num_flips:
                assert Path(f"/proc/{pid}").exists(), "the job has ended"
                time.sleep(0.01)
            gate.unlink()

        unfailed = peace(launch, FLAGS)
        job = run_job(
            launch,
            [*FLAGS, *inject(*specs)],
            during=open_gate,
            script="tests/deadpool/gated_pretrain.py",
        )
        return job, unfailed

    return run


def check_same(job: Job, unfailed: Job) -> None:
    job.check_clean()
    assert job.losses == unfailed.losses
    assert job.parameters == unfailed.parameters


def test_own_snapshot_damaged_and_state_alive_is_taken_anew(run_damaged):
    """Node 1 held the only replica of slot 0: nothing but the live state is left of iteration 3."""
    job, unfailed = run_damaged(
        PAIR, "flip-snapshot=0@iteration=3", "kill-node=1@iteration=4,phase=forward"
    )
    check_same(job, unfailed)
    assert damage_said(job) == [(0, 0, 3)]
    assert repairs(job) == [3]


def test_own_snapshot_damaged_inside_the_step_comes_from_the_neighbour(run_damaged):
    job, unfailed = run_damaged(
        RING, "flip-snapshot=0@iteration=3", "kill-node=2@iteration=4,phase=optimizer"
    )
    check_same(job, unfailed)
    assert damage_said(job) == [(0, 0, 3)]
    assert repairs(job) == [3]


def test_replica_damaged_sends_everybody_back_by_one_more_iteration(run_damaged):
    job, unfailed = run_damaged(
        PAIR, "flip-replica=0@iteration=3", "kill-node=1@iteration=4,phase=forward"
    )
    check_same(job, unfailed)
    assert damage_said(job) == [(0, 1, 3)]
    assert repairs(job) == [2]


def test_own_and_only_replica_damaged_inside_the_step_goes_back_too(run_damaged):
    job, unfailed = run_damaged(
        RING,
        "flip-snapshot=0@iteration=3",
        "flip-replica=1@iteration=3",
        "kill-node=2@iteration=4,phase=optimizer",
    )
    check_same(job, unfailed)
    assert damage_said(job) == [(0, 0, 3), (1, 0, 3)]
    assert repairs(job) == [2]


def test_last_good_copy_gone_ends_with_the_words_that_say_how_to_resume(run_damaged):
    """While iteration 4 is captured over iteration 2, the damaged 3 is all there is."""
    job, _ = run_damaged(
        PAIR, "flip-replica=0@iteration=3", "kill-node=1@iteration=4,phase=capture"
    )
    job.check_clean(exit_code=4)
    assert damage_said(job) == [(0, 1, 3)]
    assert "resume from the last checkpoint with --load" in job.output
