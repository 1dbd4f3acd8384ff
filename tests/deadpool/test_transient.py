"""Errors in trainers of living nodes: mended in place without a spare, unless they come again."""

from __future__ import annotations

import json
import subprocess

import pytest

from deadpool.errors import describe, is_of_communication, kind_of
from tests.deadpool.test_job import PIPELINE, launch

ERRING = "tests/deadpool/erring_pretrain.py"
FLAGS = [*PIPELINE, "--train-iters", "7"]


def repairs(job) -> list[dict]:
    return [r for r in job.records("events.jsonl") if r["event"] == "repair"]


@pytest.fixture
def run_erring(run_job, tmp_path):
    """`run_erring(times, *more flags, ...)`: the last slot errs, while others wait for it."""

    def run(times, *more, slot=3, iteration=4, phase="forward", fault="error"):
        log_dir = tmp_path / "log"
        log_dir.mkdir()
        told = {"slot": slot, "iteration": iteration, "phase": phase, "times": times}
        told["fault"] = fault
        (log_dir / "errors.json").write_text(json.dumps(told))
        flags = [*FLAGS, *more, "--deadpool-log-dir", str(log_dir)]
        job = run_job(launch(3, 1), flags, script=ERRING)
        return type(job)(
            exit_code=job.exit_code, output=job.output, left_over=job.left_over, log_dir=log_dir
        )

    return run


@pytest.mark.parametrize("slot", [0, 3], ids=["leader", "last"])
@pytest.mark.parametrize("phase", ["forward", "backward", "optimizer"])
def test_error_in_a_phase_is_mended_in_place_bit_identical(run_erring, peace, slot, phase):
    unfailed = peace(launch(3, 1), FLAGS)
    job = run_erring(1, slot=slot, phase=phase)
    job.check_clean()
    assert job.swaps == [] and len(repairs(job)) == 1
    assert repairs(job)[0]["restored_iteration"] == 3
    node = slot // 2
    assert f"node {node}: iteration 4 failed with ValueError: a fault on purpose" in job.output
    assert job.losses == unfailed.losses
    assert job.parameters == unfailed.parameters


def test_error_that_comes_again_ends_the_job_with_it(run_erring):
    job = run_erring(2)
    job.check_clean(exit_code=1)
    assert len(repairs(job)) == 0
    assert "iteration 4 failed again" in job.output
    assert "ValueError: a fault on purpose, number 2" in job.output


def suspects(job) -> list[tuple[int, int]]:
    return [
        (r["node"], r["iteration"])
        for r in job.records("events.jsonl")
        if r["event"] == "suspected-corruption"
    ]


@pytest.mark.parametrize(
    "fault, phase, slot",
    [("nan gradient", "backward", 0), ("inf parameters", "forward", 3)],
    ids=["gradient", "loss"],
)
def test_non_finite_value_that_does_not_come_again_is_suspected(
    run_erring, peace, fault, phase, slot
):
    unfailed = peace(launch(3, 1), FLAGS)
    job = run_erring(1, fault=fault, phase=phase, slot=slot)
    job.check_clean()
    assert job.swaps == [] and len(repairs(job)) == 1
    assert suspects(job) == [(slot // 2, 4)]
    assert f"node {slot // 2}: suspected silent corruption: iteration 4" in job.output
    assert job.losses == unfailed.losses
    assert job.parameters == unfailed.parameters


def test_non_finite_value_that_comes_again_ends_the_job_with_it(run_erring):
    job = run_erring(99, fault="nan gradient", phase="backward")  # In every microbatch.
    job.check_clean(exit_code=1)
    assert suspects(job) == []
    assert "node 1: iteration 4 failed again" in job.output
    assert "found NaN in local grad norm" in job.output


def raised(function, *args) -> BaseException:
    try:
        function(*args)
    except Exception as error:
        return error
    raise AssertionError("nothing was raised")


def test_errors_of_communication_are_told_from_others() -> None:
    import torch.distributed as dist

    def all_reduce_without_groups() -> None:
        import torch

        dist.all_reduce(torch.zeros(1))

    def gives_up() -> None:
        try:
            all_reduce_without_groups()
        except ValueError:
            raise KeyError("what came of it")  # noqa: B904

    assert is_of_communication(raised(all_reduce_without_groups))
    assert is_of_communication(raised(gives_up))
    assert not is_of_communication(raised(int, "x"))
    assert not is_of_communication(raised(subprocess.run, ["/nowhere"]))


def test_errors_have_a_kind_and_one_line() -> None:
    one, other = raised(int, "x"), raised(int, "y")
    assert kind_of(one) == kind_of(other) == "builtins.ValueError"
    infinite = RuntimeError("Rank 1: Unexpected result inf (message='found Inf in local forward')")
    assert kind_of(infinite) == "non-finite" != kind_of(RuntimeError("inf"))
    assert describe(RuntimeError("first\nsecond")) == "RuntimeError: first"
    assert describe(AssertionError()) == "AssertionError"
