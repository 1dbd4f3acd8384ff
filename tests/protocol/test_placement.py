"""Placement against brute force and against megatron-core's own rank generator."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from megatron.core.parallel_state import RankGenerator

from deadpool.protocol.placement import (
    Grid,
    assign_slots,
    choose_holders,
    choose_restore_point,
    node_position,
)
from deadpool.protocol.types import Holdings, Iteration, Member, MemberId, Node, Slot

SIZES = [
    (tensor, context, pipeline, data)
    for tensor, context, pipeline, data in itertools.product(
        (1, 2, 4), (1, 2), (1, 2, 3), (1, 2, 3, 4)
    )
    if tensor * context * pipeline * data <= 32
]
GRIDS = [
    Grid(
        world_size=tensor * context * pipeline * data,
        ranks_per_node=ranks_per_node,
        tensor=tensor,
        context=context,
        pipeline=pipeline,
        pipeline_before_data=pipeline_before_data,
    )
    for tensor, context, pipeline, data in SIZES
    for ranks_per_node in (1, 2, 3, 4, 8)
    if tensor * context * pipeline * data % ranks_per_node == 0
    for pipeline_before_data in (False, True)
]
MANY_NODES = [grid for grid in GRIDS if grid.num_nodes > 1]


def megatron_data_groups(grid: Grid) -> list[list[int]]:
    """megatron-core's data-parallel groups, without context parallelism in them."""
    order = "tp-cp-ep-pp-dp" if grid.pipeline_before_data else "tp-cp-ep-dp-pp"
    generator = RankGenerator(
        tp=grid.tensor, ep=1, dp=grid.data, pp=grid.pipeline, cp=grid.context, order=order
    )
    return generator.get_ranks("dp")


def test_data_parallel_ring_over_grids_is_megatrons_group_rotated() -> None:
    for grid in GRIDS:
        for group in megatron_data_groups(grid):
            for place, slot in enumerate(group):
                rotated = group[place + 1 :] + group[:place]
                assert list(grid.data_parallel_ring(Slot(slot))) == rotated, (grid, slot)


def test_holders_over_grids_are_each_on_a_node_of_its_own() -> None:
    for grid in MANY_NODES:
        for replicas in range(1, grid.num_nodes):
            for slot, holders in enumerate(choose_holders(grid, replicas)):
                nodes = {x // grid.ranks_per_node for x in (slot, *holders)}
                assert len(holders) == replicas and len(nodes) == 1 + replicas, (grid, slot)


def test_holders_over_grids_are_data_parallel_peers_elsewhere_then_the_next_nodes() -> None:
    for grid in MANY_NODES:
        every = choose_holders(grid, grid.num_nodes - 1)
        for replicas in range(1, grid.num_nodes):
            assert choose_holders(grid, replicas) == tuple(x[:replicas] for x in every)
        for group in megatron_data_groups(grid):
            for place, slot in enumerate(group):
                first_on: dict[int, int] = {}
                for peer in group[place + 1 :] + group[:place]:
                    first_on.setdefault(peer // grid.ranks_per_node, peer)
                first_on.pop(slot // grid.ranks_per_node, None)
                peers = list(first_on.values())
                assert list(every[slot][: len(peers)]) == peers, (grid, slot)
                rest = every[slot][len(peers) :]
                ways = [(x - slot) % grid.world_size for x in rest]
                assert ways == sorted(ways) and all(way % grid.ranks_per_node == 0 for way in ways)


@pytest.mark.parametrize("replicas", [0, 3])
def test_replicas_that_do_not_fit_are_refused_saying_how_many_do(replicas: int) -> None:
    with pytest.raises(ValueError, match=f"{replicas} replicas on 3 nodes .* 1 to 2"):
        choose_holders(grid_of(3, 4), replicas)


def test_holders_on_one_node_are_refused_saying_why() -> None:
    grid = Grid(
        world_size=4, ranks_per_node=4, tensor=2, context=1, pipeline=1, pipeline_before_data=False
    )
    with pytest.raises(ValueError, match="4 ranks on one node"):
        choose_holders(grid, 1)


def test_node_position_over_grids_splits_the_world_evenly() -> None:
    for grid in GRIDS:
        positions = [node_position(grid, Slot(slot)) for slot in range(grid.world_size)]
        counts = [positions.count(node) for node in range(grid.num_nodes)]
        assert counts == [grid.ranks_per_node] * grid.num_nodes
        assert positions == sorted(positions)


# The restore point

iterations = st.integers(0, 4).map(Iteration)
holdings = st.builds(
    Holdings,
    own=st.frozensets(iterations, max_size=2),
    replicas=st.frozensets(st.tuples(st.integers(0, 3).map(Slot), iterations), max_size=8),
)


@st.composite
def memories(draw: st.DrawFn) -> tuple[list[tuple[Slot, MemberId]], dict[MemberId, Holdings]]:
    """Four slots held by members in any order, and what some of them hold."""
    numbers = draw(st.permutations([MemberId(n) for n in (3, 5, 8, 13)]))
    slots = [(Slot(slot), number) for slot, number in enumerate(numbers)]
    says = {n: draw(holdings) for n in numbers if draw(st.integers(0, 9)) > 0}
    return slots, says


@given(memories())
def test_restore_point_is_the_newest_by_brute_force(
    memory: tuple[list[tuple[Slot, MemberId]], dict[MemberId, Holdings]],
) -> None:
    slots, says = memory
    complete = [
        iteration
        for iteration in range(5)
        if all(
            (member in says and iteration in says[member].own)
            or any((slot, iteration) in h.replicas for h in says.values())
            for slot, member in slots
        )
    ]
    point = choose_restore_point(slots, says)
    assert (point[0] if point else None) == max(complete, default=None)


@given(memories())
def test_restore_point_sources_hold_what_they_are_asked_for(
    memory: tuple[list[tuple[Slot, MemberId]], dict[MemberId, Holdings]],
) -> None:
    slots, says = memory
    point = choose_restore_point(slots, says)
    if point is None:
        return
    iteration, sources = point
    for slot, member in slots:
        owns = member in says and iteration in says[member].own
        assert owns == (slot not in sources)
        if slot in sources:
            able = [n for n, h in says.items() if (slot, iteration) in h.replicas]
            assert sources[slot] == min(able)


def test_restore_point_newer_but_incomplete_is_passed_over() -> None:
    slots = [(Slot(0), MemberId(1)), (Slot(1), MemberId(2))]
    says = {
        MemberId(1): Holdings(own=frozenset({Iteration(4), Iteration(5)}), replicas=frozenset()),
        MemberId(2): Holdings(own=frozenset({Iteration(4)}), replicas=frozenset()),
    }
    assert choose_restore_point(slots, says) == (4, {})


# Slots


def grid_of(num_nodes: int, ranks_per_node: int = 1) -> Grid:
    return Grid(
        world_size=num_nodes * ranks_per_node,
        ranks_per_node=ranks_per_node,
        tensor=1,
        context=1,
        pipeline=1,
        pipeline_before_data=False,
    )


def members(node: int, numbers: list[int]) -> list[Member]:
    return [
        Member(
            member=MemberId(n),
            node=Node(node),
            local_rank=rank,
            host="h",
            control_port=1,
            data_port=2,
        )
        for rank, n in enumerate(numbers)
    ]


def test_slots_of_a_launch_go_to_nodes_in_the_order_of_members() -> None:
    alive = members(4, [9, 8]) + members(2, [1, 2]) + members(7, [5, 6])
    assert assign_slots(grid_of(2, 2), alive, {}, set()) == (9, 8, 1, 2)


def test_slots_of_a_lost_node_go_to_the_first_complete_spare() -> None:
    alive = members(1, [3, 4]) + members(5, [7]) + members(6, [9, 8]) + members(2, [11, 12])
    bound = {MemberId(3): Slot(2), MemberId(4): Slot(3)}
    assert assign_slots(grid_of(2, 2), alive, bound, set(bound)) == (9, 8, 3, 4)


def test_slots_without_a_complete_spare_are_none() -> None:
    alive = members(1, [3, 4]) + members(5, [7])
    assert assign_slots(grid_of(2, 2), alive, {MemberId(3): Slot(2)}, set()) is None


def test_slots_that_two_nodes_were_built_for_go_to_the_one_that_trained() -> None:
    alive = members(0, [1]) + members(1, [2]) + members(2, [3])
    bound = {MemberId(1): Slot(0), MemberId(2): Slot(1), MemberId(3): Slot(1)}
    assert assign_slots(grid_of(2), alive, bound, {MemberId(1), MemberId(3)}) == (1, 3)
    assert assign_slots(grid_of(2), alive, bound, {MemberId(1), MemberId(2)}) == (1, 2)


@given(st.lists(st.booleans(), min_size=8, max_size=8), st.integers(0, 3))
def test_slots_after_any_losses_are_held_once_and_survivors_stay(
    lives: list[bool], num_spares: int
) -> None:
    everybody = [members(n, [2 * n, 2 * n + 1]) for n in range(8 + num_spares)]
    alive = [x for n, m in enumerate(everybody) if n >= 8 or lives[n] for x in m]
    bound = {MemberId(s): Slot(s) for s in range(16) if lives[s // 2]}
    slots = assign_slots(grid_of(8, 2), alive, bound, set(bound))
    assert (slots is None) == (lives.count(False) > num_spares)
    if slots is not None:
        assert len(set(slots)) == 16
        assert all(slots[slot] == member for member, slot in bound.items())


def count_calls(function: Callable[[], object]) -> int:
    """Work without a clock."""
    calls = 0

    def on_event(frame: object, event: str, argument: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    sys.setprofile(on_event)
    try:
        function()
    finally:
        sys.setprofile(None)
    return calls


def test_placement_of_ten_thousand_slots_works_in_proportion() -> None:
    def place(num_nodes: int) -> None:
        grid = grid_of(num_nodes, 4)
        holders = choose_holders(grid, 1)
        alive = [
            x for n in range(1, num_nodes + 2) for x in members(n, list(range(4 * n, 4 * n + 4)))
        ]
        bound = {MemberId(s): Slot(s) for s in range(4, 4 * num_nodes)}
        slots = assign_slots(grid, alive, bound, set(bound))
        assert slots is not None
        kept: dict[MemberId, set[tuple[Slot, Iteration]]] = {}
        for slot, (holder,) in enumerate(holders):
            kept.setdefault(slots[holder], set()).add((Slot(slot), Iteration(7)))
        says = {
            x: Holdings(
                own=frozenset({Iteration(7)} if x in bound else ()),
                replicas=frozenset(kept.get(x, ())),
            )
            for x in slots
        }
        point = choose_restore_point([(Slot(s), x) for s, x in enumerate(slots)], says)
        assert point is not None and point[0] == 7 and set(point[1]) == {0, 1, 2, 3}

    small, large = (count_calls(lambda n=n: place(n)) for n in (250, 2500))
    assert large < 11 * small
