"""Random schedules of small worlds, and the seeds that once broke something."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from deadpool.protocol.invariants import Violated
from deadpool.simulation.schedule import KINDS, Scenario, Schedule, run_seed, scenario_of
from deadpool.simulation.world import Mistakes

REGRESSIONS = {
    836: "a leader that was stopped ended with its own code beside its successor's end",
    924: "a spare that had joined anew was sent differences to a roster it had not seen",
    12484: "the launch's leader, cut off, ended alone beside its successor",
    13389: "spares that outlived every slot began training anew",
    17757: "a spare led by the majority of a roster that was never in force",
    35014: "a minority took over an end that no majority had noted",
    51705: "the model itself closed a connection twice",
    52966: "two minorities told different ends",
    54456: "a leader with silent ranks on its own node fenced its majority",
    60546: "half of a launch ended with another cause than the other half",
    61098: "a leader whose trainer was killed led empty epochs for ever",
    113461: "a rank beside a leader that had stepped down took its node for lost",
    115393: "a leader took resets for losses, and fenced nodes one by one up to half",
    879949: "who had not noticed the leader's death yet sent its supporters back to it",
    883126: "a store was asked of a member that the coming plan had no place for, for ever",
    1549: "a candidate did not hear the epoch of one that it had supported before, and was lost",
    505133: "the check itself: a leader heard late that all were ready, who had gone on by then",
    12548: "two leaders without a majority followed each other in turn, for ever",
    202727: "a leader that was stopped came back, lost two nodes, and ended without a spare",
    904474: "who still followed a leader that others had lost was lost to the next one by silence",
}
"""What each found when it broke. The model has changed since, and with it what a seed means: they
are kept as samples that must hold, and need not meet the same mistake again."""

scenarios = st.builds(
    Scenario,
    seed=st.integers(0, 2**32),
    num_nodes=st.integers(2, 3),
    ranks_per_node=st.integers(1, 2),
    num_spare_nodes=st.integers(0, 2),
    last=st.integers(1, 4),
    num_faults=st.integers(0, 4),
    num_regroup_failures=st.sampled_from([0, 1, 6]),
    delay=st.sampled_from([0.05, 0.3, 0.8]),
    stray=st.sampled_from([0.0, 0.1]),
    returns=st.sampled_from([0.0, 0.5, 1.0]),
    kinds=st.lists(st.sampled_from(KINDS), min_size=1, max_size=3).map(tuple),
)


@example(
    Scenario(
        seed=21674417,
        num_nodes=2,
        ranks_per_node=2,
        num_spare_nodes=0,
        last=1,
        num_faults=2,
        num_regroup_failures=0,
        delay=0.8,
        stray=0.1,
        returns=0.0,
        kinds=("late node",),
    )
)
@settings(
    max_examples=400, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck)
)
@given(scenarios)
def test_schedule_of_any_scenario_holds_the_invariants(scenario: Scenario) -> None:
    Schedule(scenario).run()


@pytest.mark.parametrize("seed", REGRESSIONS, ids=str)
def test_schedule_that_once_broke_holds(seed: int) -> None:
    run_seed(seed)


def test_schedule_of_a_seed_is_replayed_exactly() -> None:
    traces: list[list[str]] = [[], []]
    for trace in traces:
        run_seed(836, trace=trace.append)
    assert traces[0] == traces[1] and len(traces[0]) > 100


def test_schedules_meet_every_kind_of_fault_and_end() -> None:
    """What is sampled is not only the quiet case."""
    outcomes = [run_seed(seed) for seed in range(150)]
    ends = Counter(outcome.kind for outcome in outcomes)
    faults = {fault.split(" ", 1)[1] for outcome in outcomes for fault in outcome.faults}
    assert all(any(kind in fault for fault in faults) for kind in KINDS)
    assert ends["0"] > 75 and len(ends) > 5


def test_schedules_without_waiting_for_the_commit_are_caught() -> None:
    with pytest.raises(Violated):
        for seed in range(50):
            run_seed(seed, mistakes=Mistakes(waits_for_commit=False))


def test_scenario_of_a_seed_is_the_same_again() -> None:
    assert scenario_of(5) == scenario_of(5) != scenario_of(6)
