"""Every order of events in small worlds, with the real cores; and seeded mistakes, all found.

The larger worlds take minutes: `DEADPOOL_SEARCH=large`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Callable, Set
from typing import Any
from unittest import mock

import pytest

from deadpool.protocol import ballot, leader
from deadpool.protocol import messages as m
from deadpool.protocol.invariants import Violated
from deadpool.protocol.types import MemberId, Phase, Roster
from deadpool.simulation.search import run_quietly, search
from deadpool.simulation.world import NO_MISTAKES, Mistakes, World, small_grid

is_large = pytest.mark.skipif(
    os.environ.get("DEADPOOL_SEARCH") != "large", reason="takes minutes: DEADPOOL_SEARCH=large"
)

Codes = Callable[[Set[int]], bool]


def completes(codes: Set[int]) -> bool:
    return codes == {0}


def somebody_completes(codes: Set[int]) -> bool:
    """The others were cut off: fenced, or without a majority."""
    return 0 in codes and codes <= {0, 6, 72}


def one_end(codes: Set[int]) -> bool:
    return len(codes - {6, 70, 72}) <= 1


def training_world(
    *,
    slots: int = 2,
    spares: int = 1,
    last: int = 1,
    ranks_per_node: int = 1,
    mistakes: Mistakes = NO_MISTAKES,
    **budget: int,
) -> World:
    """The first commit is made and heard. budget: `losses=1` and the like."""
    world = World(
        grid=small_grid(slots // ranks_per_node, ranks_per_node),
        num_spare_nodes=spares,
        last=last,
        mistakes=mistakes,
    )

    def trains(world: World) -> bool:
        cores = [process.core for process in world.processes.values()]
        return all(c.installed for c in cores) and all(c.committed == 0 for c in cores[:slots])

    return with_budget(run_quietly(world, trains), budget)


def with_budget(world: World, budget: dict[str, int]) -> World:
    for name, number in budget.items():
        assert hasattr(world, f"{name}_left"), name
        setattr(world, f"{name}_left", number)
    return world


@pytest.mark.parametrize(
    ("sizes", "allowed"),
    [
        ({}, completes),
        ({"losses": 1, "last": 2}, completes),
        ({"losses": 1, "spares": 2}, completes),
        ({"losses": 1, "regroup_failures": 1}, completes),
        ({"losses": 1, "late": 1}, completes),
        ({"losses": 1, "copies": 1}, completes),
        ({"losses": 2}, one_end),
        ({"resets": 1}, somebody_completes),
        ({"suspicions": 1}, somebody_completes),
    ],
    ids=lambda value: "-".join(f"{k}{v}" for k, v in value.items()) if type(value) is dict else "",
)
def test_search_from_training_holds_the_invariants(sizes: dict[str, int], allowed: Codes) -> None:
    searched = search(training_world(**sizes), allowed=allowed)
    print(sizes, searched)


def test_search_from_forming_one_loss_at_any_moment_ends_alike() -> None:
    world = World(grid=small_grid(2), num_spare_nodes=1, last=1)
    print(search(with_budget(world, {"losses": 1}), allowed=one_end))


@is_large
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    "sizes",
    [
        {"losses": 2, "spares": 2},
        {"losses": 1, "suspicions": 1},
        {"losses": 1, "resets": 1},
        {"losses": 1, "slots": 3},
        {"losses": 1, "slots": 4, "ranks_per_node": 2},
        {"suspicions": 2},
    ],
    ids=lambda sizes: "-".join(f"{k}{v}" for k, v in sizes.items()),
)
def test_search_of_a_large_world_holds_the_invariants(sizes: dict[str, int]) -> None:
    print(sizes, search(training_world(**sizes), allowed=one_end))


# Seeded mistakes


def commits_when_the_first_has_staged(
    self: leader.Leader, sender: MemberId, message: m.Staged
) -> list[Any]:
    members = list(self._slot_of) if message.epoch == self.epoch else []
    return [a for x in members for a in leader.Leader._take_staged(self, x, message)]


def takes_ready_of_any_epoch(self: leader.Leader, sender: MemberId, message: m.Ready) -> list[Any]:
    now = dataclasses.replace(message, epoch=self.epoch)
    return leader.Leader._take_ready(self, sender, now)


def patched(*patches: Any) -> contextlib.ExitStack:
    stack = contextlib.ExitStack()
    for patch in patches:
        stack.enter_context(patch)
    return stack


def test_search_with_commits_before_staging_finds_it() -> None:
    staged = {m.Staged: commits_when_the_first_has_staged}
    with patched(
        mock.patch.dict(leader._TABLE[Phase.TRAINING], staged),
        mock.patch.dict(leader._TABLE[Phase.REGROUPING], staged),
        pytest.raises(Violated, match="can be restored everywhere"),
    ):
        world = World(grid=small_grid(2), num_spare_nodes=1, last=2)
        search(with_budget(world, {"losses": 1}))


def test_search_with_one_buffer_finds_it() -> None:
    with pytest.raises(Violated, match="can be restored everywhere"):
        search(training_world(last=2, mistakes=Mistakes(num_buffers=1), losses=1))


def test_search_with_steps_that_do_not_wait_for_the_commit_finds_it() -> None:
    world = World(
        grid=small_grid(2),
        num_spare_nodes=1,
        last=3,
        mistakes=Mistakes(waits_for_commit=False),
    )
    with pytest.raises(Violated, match=r"are run again|can be restored everywhere"):
        search(with_budget(world, {"losses": 1}))


def test_search_with_minorities_that_lead_finds_it() -> None:
    with patched(
        mock.patch.object(Roster, "is_quorum", lambda self, voters: True),
        mock.patch.object(ballot.Ballot, "is_passed", property(lambda self: True)),
        pytest.raises(Violated, match=r"2: |3: |4: |surviving members end"),
    ):
        search(training_world(suspicions=2))


def test_search_without_a_check_of_epochs_finds_it() -> None:
    ready = {m.Ready: takes_ready_of_any_epoch}
    with patched(
        mock.patch.dict(leader._TABLE[Phase.REGROUPING], ready),
        pytest.raises(Violated, match="are not ready"),
    ):
        search(training_world(losses=1, regroup_failures=1, late=1))
