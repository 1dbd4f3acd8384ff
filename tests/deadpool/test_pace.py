"""How often snapshots are taken: the choice, and the clock of one slot's snapshots."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deadpool.pace import (
    MAX_INTERVAL,
    Pace,
    SnapshotClock,
    Windows,
    choose_interval,
    most_iterations_rerun,
)
from deadpool.protocol import events as e
from deadpool.protocol.types import Epoch, Iteration

seconds = st.floats(0.001, 100.0)


def windows(iteration: int, copy_s: float) -> Windows:
    return Windows(
        iteration=Iteration(iteration),
        capture_s=copy_s / 4,
        replicate_s=copy_s / 2,
        commit_s=copy_s / 4,
        stall_s=0.5,
    )


@given(seconds, seconds, st.integers(1, MAX_INTERVAL))
def test_interval_hides_the_copy_and_stays_once_chosen(
    copy_s: float, iteration_s: float, current: int
) -> None:
    chosen = choose_interval(copy_s=copy_s, iteration_s=iteration_s, current=current)
    assert 1 <= chosen <= MAX_INTERVAL
    assert copy_s <= 0.9 * chosen * iteration_s * (1 + 1e-9) or chosen == MAX_INTERVAL
    again = choose_interval(copy_s=copy_s, iteration_s=iteration_s, current=chosen)
    assert again == chosen
    # Never longer than a copy that fills 6 tenths of it asks for, unless it was so before.
    assert chosen <= max(1, math.ceil(copy_s / (0.6 * iteration_s)), 1) or chosen <= current


def test_interval_does_not_follow_small_changes() -> None:
    assert choose_interval(copy_s=1.85, iteration_s=1.0, current=1) == 3
    assert choose_interval(copy_s=1.75, iteration_s=1.0, current=3) == 3
    assert choose_interval(copy_s=1.15, iteration_s=1.0, current=3) == 2
    assert choose_interval(copy_s=0.5, iteration_s=1.0, current=3) == 1


@pytest.mark.parametrize("interval", range(1, 7))
def test_most_iterations_rerun_is_reached_and_never_passed(interval: int) -> None:
    """Every moment of a run: snapshots at multiples, each committed only when the step that
    makes the next one begins."""
    worst = 0
    for completed in range(2 * interval, 10 * interval):
        newest = completed - completed % interval
        committed = newest - interval  # Its commit may come as late as the next capture's step.
        worst = max(worst, completed - committed)
    assert worst == most_iterations_rerun(interval)


def test_pace_wants_what_its_figures_say_and_says_what_a_loss_costs() -> None:
    pace = Pace(None)
    assert pace.is_auto and pace.wanted() == 1
    for iteration in range(5):
        pace.note(windows(iteration, copy_s=2.4))
        pace.note_iteration(1.0)
    assert pace.wanted() == 3
    assert "every 3 iterations" in (words := pace.adopt(3)) and "at most 5 completed" in words
    assert pace.adopt(3) == ""
    assert [i for i in range(10) if pace.is_due(i)] == [0, 3, 6, 9]
    pace.restore(2)
    assert pace.interval == 2 and pace.wanted() == 2


def test_pace_that_was_told_its_interval_keeps_it() -> None:
    pace = Pace(4)
    pace.restore(1)
    assert not pace.is_auto and pace.interval == 4


def test_metrics_are_means_since_the_last_call() -> None:
    pace = Pace(1)
    pace.note(windows(1, copy_s=4.0))
    pace.note(windows(2, copy_s=2.0))
    assert pace.metrics() == {
        "snapshot capture (ms)": 750.0,
        "snapshot replicate (ms)": 1500.0,
        "snapshot commit (ms)": 750.0,
        "snapshot stall (ms)": 500.0,
    }
    assert pace.metrics() == {}


def test_clock_measures_each_snapshot_between_its_own_events() -> None:
    clock, epoch = SnapshotClock(), Epoch(1)
    clock.see(e.Captured(epoch=epoch, iteration=Iteration(5)), 10.0)
    clock.see(e.PutDone(epoch=epoch, iteration=Iteration(5)), 12.5)
    clock.see(e.Captured(epoch=epoch, iteration=Iteration(6)), 13.0)
    assert clock.committed(Iteration(5), 13.25) == (2.5, 0.75)
    clock.see(e.PutDone(epoch=epoch, iteration=Iteration(6)), 14.0)
    assert clock.committed(Iteration(6), 14.5) == (1.0, 0.5)
    assert clock.committed(Iteration(4), 20.0) == (0.0, 0.0)
