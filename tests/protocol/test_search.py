"""Every order of events in small worlds, with the real cores.

The larger worlds take minutes: `DEADPOOL_SEARCH=large`.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Set

import pytest

from deadpool.protocol.types import MemberId
from deadpool.simulation.search import apply, moves_of, run_quietly, search
from deadpool.simulation.world import World, small_grid
from tests.protocol.worlds import training_world, with_budget

is_large = pytest.mark.skipif(
    os.environ.get("DEADPOOL_SEARCH") != "large", reason="takes minutes: DEADPOOL_SEARCH=large"
)

Codes = Callable[[Set[int]], bool]


def name_of(value: object) -> str:
    return "-".join(f"{k}{v}" for k, v in value.items()) if isinstance(value, dict) else ""


def completes(codes: Set[int]) -> bool:
    return codes == {0}


def somebody_completes(codes: Set[int]) -> bool:
    """The others were cut off: fenced, or without a majority."""
    return 0 in codes and codes <= {0, 6, 72}


def one_end(codes: Set[int]) -> bool:
    return len(codes - {6, 70, 72}) <= 1


@pytest.mark.parametrize(
    ("sizes", "allowed"),
    [
        ({}, completes),
        ({"losses": 1, "last": 2}, completes),
        ({"losses": 1, "spares": 2}, completes),
        ({"losses": 1, "regroup_failures": 1}, completes),
        ({"losses": 1, "late": 1}, completes),
        ({"errors": 1}, completes),
        ({"crashes": 1}, completes),
        ({"hangs": 1}, completes),
        ({"losses": 1, "copies": 1}, completes),
        ({"losses": 2}, one_end),
        ({"resets": 1}, somebody_completes),
        ({"suspicions": 1}, somebody_completes),
    ],
    ids=name_of,
)
def test_search_from_training_holds_the_invariants(sizes: dict[str, int], allowed: Codes) -> None:
    searched = search(training_world(**sizes), allowed=allowed)
    print(sizes, searched)


def test_search_from_forming_one_loss_at_any_moment_ends_alike() -> None:
    world = World(grid=small_grid(2), num_spare_nodes=1, last=1)
    print(search(with_budget(world, {"losses": 1}), allowed=one_end))


@pytest.mark.parametrize(
    ("sizes", "allowed"),
    [
        ({"losses": 1, "slots": 4}, completes),
        ({"losses": 2, "spares": 2}, one_end),
        ({"losses": 1, "errors": 1}, completes),
        ({"errors": 2, "slots": 3}, lambda codes: codes in ({0}, {1})),
        ({"crashes": 2}, completes),
        ({"crashes": 1, "losses": 1}, completes),
        ({"hangs": 1, "losses": 1}, completes),
        ({"hangs": 1, "slots": 3}, completes),
        ({"hangs": 2}, completes),
        ({"crashes": 1, "slots": 3}, completes),
        ({"crashes": 1, "resets": 1}, somebody_completes),
        ({"losses": 1, "regroup_failures": 1, "spares": 3}, completes),
        ({"resets": 1, "slots": 3}, somebody_completes),
        pytest.param({"suspicions": 1, "slots": 3}, somebody_completes, marks=is_large),
        pytest.param({"losses": 2, "slots": 3, "spares": 2}, one_end, marks=is_large),
        pytest.param(
            {"losses": 2, "slots": 3, "spares": 2, "replicas": 2}, completes, marks=is_large
        ),
        pytest.param({"losses": 1, "slots": 4, "ranks_per_node": 2}, completes, marks=is_large),
        pytest.param({"crashes": 1, "slots": 4, "ranks_per_node": 2}, completes, marks=is_large),
        pytest.param({"resets": 1, "slots": 4}, somebody_completes, marks=is_large),
        pytest.param({"suspicions": 1, "slots": 4}, somebody_completes, marks=is_large),
        pytest.param({"suspicions": 2}, somebody_completes, marks=is_large),
    ],
    ids=name_of,
)
@pytest.mark.timeout(3600)
def test_search_with_trainers_at_once_holds_the_invariants(
    sizes: dict[str, int], allowed: Codes
) -> None:
    """Every order of messages and faults; see `at_once`."""
    print(sizes, search(training_world(**sizes), allowed=allowed, at_once=True))


@pytest.mark.parametrize(("replicas", "ends"), [(1, {4}), (2, {0})], ids=["one", "two"])
def test_two_nodes_lost_at_once_at_any_moment_are_survived_by_two_replicas(
    replicas: int, ends: set[int]
) -> None:
    """Every pair, at every moment of a quiet run. With one replica in a ring of three, each pair
    takes the state of one of them with it."""
    found: set[int] = set()
    world = training_world(slots=3, spares=2, last=3, replicas=replicas)
    while any(process.completed < 3 for process in list(world.processes.values())[:3]):
        for pair in itertools.combinations(range(3), 2):
            hit = world.copy()
            hit.crash(map(MemberId, pair))
            run_quietly(hit, World.is_over)
            found |= set(hit.history.exits.values())
        apply(world, next(moves_of(world)))
    assert found == ends


@is_large
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    "sizes",
    [
        {"losses": 2, "spares": 2},
        {"losses": 1, "suspicions": 1},
        {"losses": 1, "resets": 1},
        {"losses": 1, "slots": 3},
    ],
    ids=name_of,
)
def test_search_of_a_large_world_holds_the_invariants(sizes: dict[str, int]) -> None:
    print(sizes, search(training_world(**sizes), allowed=one_end))
