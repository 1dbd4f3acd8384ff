"""What a recovery costs as nodes are added: messages and bytes, which are exact; no times."""

from __future__ import annotations

import functools
import math

import pytest

from deadpool.simulation.scale import Cost
from tools.protocol_scale import BOUNDED, RECOVERIES, exponent, fits, measure, steady_state

SIZES = (16, 64, 256)


@functools.cache
def costs(num_nodes: int, ranks_per_node: int = 1) -> dict[str, Cost]:
    return measure(num_nodes, ranks_per_node)


@pytest.mark.parametrize("ranks_per_node", [1, 2])
@pytest.mark.parametrize("recovery", BOUNDED)
@pytest.mark.parametrize("measured", ["num_messages", "num_bytes"])
def test_recovery_or_join_grows_at_most_as_n_log_n(
    measured: str, recovery: str, ranks_per_node: int
) -> None:
    found = [getattr(costs(n, ranks_per_node)[recovery], measured) for n in SIZES]
    limit = exponent(SIZES, [n * math.log2(n) for n in SIZES])
    assert exponent(SIZES, found) <= limit, found


@pytest.mark.parametrize("recovery", RECOVERIES)
def test_proposal_of_a_recovery_does_not_grow_with_the_job(recovery: str) -> None:
    found = [costs(n)[recovery].proposal_bytes for n in SIZES]
    # Slots and places are numbers of one to three bytes.
    assert max(found) - min(found) <= 16, found


@pytest.mark.parametrize("recovery", RECOVERIES)
def test_no_message_of_a_recovery_is_large(recovery: str) -> None:
    assert all(costs(n)[recovery].largest < 256 for n in SIZES)


def test_iteration_and_heartbeats_take_two_messages_a_guardian() -> None:
    for n in SIZES:
        assert costs(n)["iteration"].num_messages == 2 * (n - 1)
        assert costs(n)["heartbeats"].num_messages == 2 * (n + 1)


def test_forming_alone_sends_everything_to_everybody() -> None:
    assert 1.5 < exponent(SIZES, [costs(n)["form"].num_bytes for n in SIZES]) < 2
    assert exponent(SIZES, [costs(n)["form"].num_messages for n in SIZES]) < 1.05


# The tool's arithmetic


def test_exponent_of_a_power_law_is_found() -> None:
    assert exponent(SIZES, [3 * n**1.5 for n in SIZES]) == pytest.approx(1.5)


def test_square_growth_is_reported() -> None:
    table = {n: dict.fromkeys(costs(n), Cost(num_messages=n, num_bytes=n * n)) for n in SIZES}
    broken = [fit for fit in fits(table) if not fit["is_within"]]
    assert {fit["measure"] for fit in broken} == {"num_bytes"}


def test_steady_state_adds_core_and_connections() -> None:
    table = {
        "heartbeats": Cost(num_messages=200, leader_s=0.01),
        "iteration": Cost(num_messages=100, leader_s=0.05),
    }
    row = steady_state(100, table, (2e-5, 1e-5))
    assert row["messages_per_s"] == pytest.approx((5 * 200 + 100) / 5)
    assert row["load"] == pytest.approx(0.02 + 110 * 2e-5 + 110 * 1e-5)
