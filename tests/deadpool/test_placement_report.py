"""What the table at the start promises, against every loss on small grids."""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Callable, Collection, Sequence
from typing import Any

import pytest

from deadpool.budget import node_needs
from deadpool.placement_report import (
    is_data_parallel_replica,
    render,
    show_slots,
    survival,
)
from deadpool.protocol.placement import (
    Grid,
    choose_holders,
    choose_restore_point,
    node_position,
)
from deadpool.protocol.types import Holdings, Iteration, MemberId, Slot

NOW = Iteration(5)


def grid(
    data: int,
    *,
    tensor: int = 1,
    pipeline: int = 1,
    ranks_per_node: int = 1,
    pipeline_before_data: bool = False,
) -> Grid:
    return Grid(
        world_size=data * tensor * pipeline,
        ranks_per_node=ranks_per_node,
        tensor=tensor,
        context=1,
        pipeline=pipeline,
        pipeline_before_data=pipeline_before_data,
    )


SMALL = [
    grid(
        data,
        tensor=tensor,
        pipeline=pipeline,
        ranks_per_node=ranks_per_node,
        pipeline_before_data=before,
    )
    for data, tensor, pipeline, ranks_per_node, before in itertools.product(
        (1, 2, 3, 4, 6), (1, 2), (1, 2, 3), (1, 2, 4), (False, True)
    )
    if data * tensor * pipeline % ranks_per_node == 0
    and 1 < data * tensor * pipeline // ranks_per_node <= 8
]


def can_restore(grid: Grid, holders: Sequence[Sequence[Slot]], lost: Collection[int]) -> bool:
    """By the leader's own decision, after spares have taken the places that are lost."""
    kept: dict[int, set[tuple[Slot, Iteration]]] = {s: set() for s in range(grid.world_size)}
    for own, kept_by in enumerate(holders):
        for holder in kept_by:
            kept[holder].add((Slot(own), NOW))
    alive = [s for s in range(grid.world_size) if node_position(grid, Slot(s)) not in lost]
    holdings = {
        MemberId(slot): Holdings(own=frozenset({NOW}), replicas=frozenset(kept[slot]))
        for slot in alive
    }
    members = [
        (Slot(slot), MemberId(slot if slot in alive else 1000 + slot))
        for slot in range(grid.world_size)
    ]
    spares = {member for _, member in members if member >= 1000}
    for spare in spares:
        holdings[spare] = Holdings(own=frozenset(), replicas=frozenset())
    return choose_restore_point(members, holdings) is not None


def many_holders(seed: int, grid: Grid) -> list[list[Slot]]:
    """One or two holders a slot, all of them on other nodes."""
    draw = random.Random(seed)
    holders = []
    for slot in map(Slot, range(grid.world_size)):
        here = node_position(grid, slot)
        others = [Slot(s) for s in range(grid.world_size) if node_position(grid, Slot(s)) != here]
        holders.append(draw.sample(others, min(len(others), draw.choice((1, 2, 2, 2, 2)))))
    return holders


def check_against_every_loss(grid: Grid, holders: Sequence[Sequence[Slot]]) -> None:
    survives = survival(grid, holders)
    nodes = range(grid.num_nodes)
    assert all(can_restore(grid, holders, {node}) for node in nodes)
    fatal = {pair for pair in itertools.combinations(nodes, 2)
             if not can_restore(grid, holders, pair)}  # fmt: skip
    assert survives.fatal_pairs == fatal
    assert survives.num_pairs == len(list(itertools.combinations(nodes, 2)))
    assert survives.num_survivable_pairs == survives.num_pairs - len(fatal)
    at_once = [
        all(can_restore(grid, holders, lost) for lost in itertools.combinations(nodes, count))
        for count in range(1, grid.num_nodes + 1)
    ]
    assert at_once == [count < survives.num_at_once for count in range(grid.num_nodes)]


def test_survival_with_one_replica_is_what_every_loss_shows() -> None:
    assert len(SMALL) > 60
    for grid in SMALL:
        for replicas in range(1, min(4, grid.num_nodes)):
            holders = choose_holders(grid, replicas)
            check_against_every_loss(grid, holders)
            assert survival(grid, holders).num_at_once == replicas


@pytest.mark.parametrize("seed", range(5))
def test_survival_with_more_replicas_is_what_every_loss_shows(seed: int) -> None:
    for grid in SMALL:
        check_against_every_loss(grid, many_holders(seed, grid))


def test_survival_of_pairs_without_replicas_elsewhere_is_none() -> None:
    """A slot with no replica at all: its node may be in no pair that is lost."""
    pairs = survival(grid(3), [(), (Slot(2),), (Slot(1),)])
    assert pairs.num_at_once == 0
    assert pairs.fatal_pairs == {(0, 1), (0, 2), (1, 2)}


def test_kind_of_replica_is_the_data_parallel_groups() -> None:
    for grid in SMALL:
        for own, (holder,) in enumerate(choose_holders(grid, 1)):
            group = [own, *grid.data_parallel_ring(Slot(own))]
            elsewhere = {s // grid.ranks_per_node for s in group} != {own // grid.ranks_per_node}
            assert is_data_parallel_replica(grid, Slot(own), holder) == elsewhere


def table(grid: Grid, sizes: Sequence[int], num_spare_nodes: int = 1) -> str:
    holders = choose_holders(grid, 1)
    needs = node_needs(grid, sizes, holders, reserve_bytes_per_rank=1 << 30)
    nodes = [10 + place for place in range(grid.num_nodes)]
    return render(grid, needs, sizes, holders, nodes=nodes, num_spare_nodes=num_spare_nodes)


def test_table_says_who_holds_what_and_what_it_takes() -> None:
    text = table(grid(2, tensor=2, ranks_per_node=2), [1 << 30] * 4)
    lines = [line.removeprefix("[deadpool]").split() for line in text.splitlines()]
    # 2 slots of 1 GiB; 2 x 2 buffers of its own, 2 x 2 of replicas, 2 of reserve.
    assert lines[1] == "10 0-1 2-3 2.00 GiB 10.00 GiB".split()
    assert lines[2] == "11 2-3 0-1 2.00 GiB 10.00 GiB".split()
    assert "survives the loss of any one node; 1 spare makes up for 1 loss" in text
    assert "survives 0 of 1 pairs (0.0%)" in text
    assert "lies with another part" not in text


def test_table_of_a_large_job_is_short_and_ends_with_the_last_node() -> None:
    large = grid(1024, ranks_per_node=1)
    text = table(large, [1 << 20] * 1024, num_spare_nodes=4)
    assert len(text.splitlines()) <= 20
    assert "and 1012 more nodes" in text
    assert re.search(r"^\[deadpool\] +1033 +1023 +1022 ", text, re.MULTILINE)
    # A ring: each node holds the only replica of the one before.
    assert f"survives {1024 * 1023 // 2 - 1024} of {1024 * 1023 // 2} pairs (99.8%)" in text
    assert "4 spares make up for 4 losses in sequence" in text
    assert "takes 2 spares (4 here)" in text
    assert max(map(len, text.splitlines())) < 160


@pytest.mark.parametrize(
    ("grid", "words"),
    [
        (grid(1, pipeline=4, ranks_per_node=2), "Every slot's .* because data parallel is 1"),
        (
            grid(2, pipeline=2, ranks_per_node=2),
            "Every slot's .* because all data-parallel peers share their node",
        ),
    ],
)
def test_table_says_where_a_replica_lies_with_another_part(grid: Grid, words: str) -> None:
    assert re.search(words, table(grid, [1000] * grid.world_size))


def test_slots_are_shown_as_runs() -> None:
    assert show_slots([]) == "none"
    assert show_slots([Slot(s) for s in (7, 4, 5, 6, 9)]) == "4-7, 9"
    assert show_slots([Slot(s) for s in range(0, 12, 2)]) == "0, 2, 4, ... 6 in all"


def test_job_prints_its_table_once_whatever_is_lost(run_job: Callable[..., Any]) -> None:
    launch = "--nodes 4 --ranks-per-node 1 --spare-nodes 1".split()
    flags = "--train-iters 5 --global-batch-size 6".split()
    job = run_job(launch, [*flags, "--deadpool-inject=kill-node=0@iteration=3,phase=backward"])
    job.check_clean()
    assert [swap["nodes_lost"] for swap in job.swaps] == [[0]]
    assert job.output.count("holds replicas of") == 1
    row = re.search(r"^\[deadpool\] +1 +1 +0 +([\d.]+) MiB +([\d.]+) MiB$", job.output, re.M)
    assert row, job.output
    # What the loss then moved is a snapshot.
    (swap,) = job.swaps
    assert abs(swap["num_bytes"] / (1 << 20) - float(row[1])) < 0.06
