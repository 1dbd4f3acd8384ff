"""Trainers that hang or are stopped under living guardians, and what is taken for that."""

from __future__ import annotations

import signal

import pytest

from deadpool.progress import Activity, ProgressBoard, Reading, Vigil
from deadpool.protocol.types import Iteration
from tests.deadpool.job_process import FAULTY_FLAGS as FLAGS
from tests.deadpool.test_job import inject, launch
from tests.deadpool.test_respawn import check_same, crash, events

HANG, STOP = "hang", signal.SIGSTOP
BOUNDS = ["--deadpool-hang-timeout", "4", "--deadpool-abort-timeout", "4"]


@pytest.fixture
def run_hanging(run_faulty):
    def run(faults, *more, **settings):
        return run_faulty(faults, *BOUNDS, *more, **settings)

    return run


@pytest.mark.parametrize(
    ("fault", "slot", "phase"),
    [(HANG, 0, "forward"), (STOP, 3, "optimizer"), (HANG, 3, "capture"), (STOP, 0, "backward")],
    ids=["hangs-leader-forward", "stopped-optimizer", "hangs-capture", "stopped-leader-backward"],
)
def test_trainer_that_hangs_is_started_anew_bit_identical(run_hanging, peace, fault, slot, phase):
    job = run_hanging([crash(slot, 4, phase, fault)])
    check_same(job, peace(launch(3, 1), FLAGS))
    assert events(job) == [("respawn", [slot // 2], [])]
    assert f"node {slot // 2}, rank {slot % 2} of it: its trainer hangs and is killed" in job.output
    assert f"trainer of node {slot // 2} started anew (hung)" in job.output


def test_trainer_that_hangs_in_evaluation_is_started_anew(run_hanging, peace):
    evaluates = ["--eval-interval", "2", "--eval-iters", "1", "--split", "90,10,0"]
    job = run_hanging([crash(1, 5, "evaluate", HANG)], *evaluates)
    check_same(job, peace(launch(3, 1), [*FLAGS, *evaluates]))
    assert events(job) == [("respawn", [0], [])]


def test_trainer_that_hangs_while_a_node_is_replaced_is_started_anew(run_hanging, peace):
    """It is in compute when the epoch is announced, and does not leave it."""
    job = run_hanging([crash(0, 4, "forward", HANG)], *inject((1, 4, "forward")))
    check_same(job, peace(launch(3, 1), FLAGS))
    assert [used for kind, _, used in events(job) if kind == "swap"] == [[2]]


def test_program_that_hangs_at_one_place_again_gets_another_node(run_hanging, peace):
    job = run_hanging([crash(2, 4, "backward", HANG, times=2)], "--deadpool-start-timeout", "6")
    check_same(job, peace(launch(3, 1), FLAGS))
    assert events(job)[-1] == ("swap", [1], [2])


@pytest.mark.faults
def test_program_that_hangs_at_one_place_on_two_nodes_ends_the_job_with_it(run_hanging):
    job = run_hanging(
        [crash(2, 4, "backward", HANG, times=99)],
        *("--deadpool-start-timeout", "6"),
        nodes=4,
        spares=2,
    )
    job.check_clean(exit_code=1)
    assert "the trainer of slot 2 hung in the iteration after 3" in job.output


def look(vigil, count, activity=Activity.FORWARD, times=1):
    reading = Reading(Iteration(7), activity, count)
    return [bool(vigil.look(reading)) for _ in range(times)]


def new_vigil() -> Vigil:
    return Vigil(hang=3, first=5, abort=2, tick_s=0.5)


def test_vigil_speaks_once_in_each_bound_without_progress() -> None:
    vigil = new_vigil()
    assert look(vigil, 1, times=8) == [False, False, False, True, False, False, True, False]
    assert look(vigil, 2, times=3) == [False] * 3, "progress"
    assert vigil.look(Reading(Iteration(7), Activity.FORWARD, 2)) == (
        "no progress for 1.5 s in forward of iteration 7"
    )


def test_first_iteration_of_a_process_is_given_longer() -> None:
    assert look(new_vigil(), 1, Activity.FIRST, times=6) == [False] * 5 + [True]


@pytest.mark.parametrize("activity", [Activity.SETUP, Activity.SAVING, Activity.FINISHED])
def test_what_others_bound_is_never_a_stall(activity) -> None:
    vigil = new_vigil()
    vigil.announced()
    assert not any(look(vigil, 1, activity, times=50))
    assert look(vigil, 2, times=3) == [False, False, True], "the announcement is still unanswered"


def test_an_announcement_is_answered_within_its_bound_or_is_not() -> None:
    vigil = new_vigil()
    look(vigil, 1, times=2)
    vigil.announced()
    assert look(vigil, 2, times=2) == [False, False], "progress is no answer"
    assert "did not leave forward of iteration 7 within 1 s" in vigil.look(
        Reading(Iteration(7), Activity.FORWARD, 3)
    )
    vigil.announced()
    vigil.answered()
    assert look(vigil, 3, times=2) == [False] * 2


def test_board_is_read_as_it_was_written() -> None:
    board = ProgressBoard()
    assert board.read() == Reading(Iteration(0), Activity.SETUP, 0)
    board.note(Activity.BACKWARD, 12)
    first = board.read()
    board.note(Activity.BACKWARD, 12)
    assert (first.iteration, first.activity) == (12, Activity.BACKWARD)
    assert board.read().count > first.count
    board.clear()
    assert board.read().activity is Activity.SETUP
