"""Who holds whose replica, what a node needs for it and which losses the job survives, in words."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

from deadpool.budget import NodeNeed
from deadpool.node_memory import show_bytes
from deadpool.protocol.placement import Grid, node_position
from deadpool.protocol.types import Slot

_NUM_ROWS = 12
"""Of nodes in the table; those beyond are summed up in a line, the last is shown."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Survival:
    """Which losses of nodes that train leave a copy of every slot's snapshot."""

    num_nodes: int
    num_at_once: int
    """Whichever so many nodes are lost together, all state is left."""
    fatal_pairs: frozenset[tuple[int, int]]
    """Places, the lower first, that may not be lost together."""

    @property
    def num_pairs(self) -> int:
        return self.num_nodes * (self.num_nodes - 1) // 2

    @property
    def num_survivable_pairs(self) -> int:
        return self.num_pairs - len(self.fatal_pairs)


def survival(grid: Grid, holders: Sequence[Sequence[Slot]]) -> Survival:
    """holders: by slot, the slots whose members keep its replicas, however many."""
    bearers = {
        tuple(sorted({node_position(grid, slot) for slot in (Slot(own), *kept_by)}))
        for own, kept_by in enumerate(holders)
    }
    return Survival(
        num_nodes=grid.num_nodes,
        num_at_once=min(map(len, bearers)) - 1,
        fatal_pairs=frozenset(pair for few in bearers for pair in _pairs_with(few, grid.num_nodes)),
    )


def _pairs_with(bearers: tuple[int, ...], num_nodes: int) -> list[tuple[int, int]]:
    """The pairs of nodes that contain all bearers of a slot."""
    if len(bearers) == 2:
        return [(bearers[0], bearers[1])]
    if len(bearers) == 1:
        here = bearers[0]
        others = (other for other in range(num_nodes) if other != here)
        return [(min(here, other), max(here, other)) for other in others]
    return []


def is_data_parallel_replica(grid: Grid, slot: Slot, holder: Slot) -> bool:
    """Whether the holder trains the same part of the model."""
    return holder in grid.data_parallel_ring(slot)


def render(
    grid: Grid,
    needs: Sequence[NodeNeed],
    sizes: Sequence[int],
    holders: Sequence[Sequence[Slot]],
    *,
    nodes: Sequence[int],
    num_spare_nodes: int,
) -> str:
    """A table of at most 20 lines and what it means.

    needs, nodes: by place; nodes has the launcher's number of the node there. sizes, holders: by
    slot.
    """
    rows: list[tuple[str, ...]] = [
        ("node", "slots", "holds replicas of", "snapshots", "host memory")
    ]
    rows += [_row(need, nodes[need.place], sizes) for need in needs]
    shown = rows
    if len(rows) - 1 > _NUM_ROWS:
        shown = [*rows[:_NUM_ROWS], rows[-1]]
    widths = [max(len(row[column]) for row in shown) for column in range(len(rows[0]))]
    lines = [
        "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True))
        for row in shown
    ]
    if len(shown) < len(rows):
        hidden = needs[_NUM_ROWS - 1 : -1]
        least, most = (show_bytes(f(n.num_bytes for n in hidden)) for f in (min, max))
        span = least if least == most else f"{least} to {most}"
        lines.insert(len(lines) - 1, f"  and {len(hidden)} more nodes that need {span} each")
    most = show_bytes(max(need.num_bytes for need in needs))
    lines.append(f"A spare needs what the node has whose place it takes, up to {most}.")
    lines += _sentences(grid, holders, num_spare_nodes)
    return "\n".join(f"[deadpool] {line}" for line in lines)


def _row(need: NodeNeed, node: int, sizes: Sequence[int]) -> tuple[str, ...]:
    return (
        str(node),
        show_slots(need.slots),
        show_slots(need.held),
        show_bytes(sum(sizes[slot] for slot in need.slots)),
        show_bytes(need.num_bytes),
    )


def show_slots(slots: Sequence[Slot]) -> str:
    """Sorted, runs as 4-7, a few of them."""
    runs = []
    ordered = sorted(set(slots))
    for _, group in itertools.groupby(enumerate(ordered), key=lambda pair: pair[1] - pair[0]):
        run = [slot for _, slot in group]
        runs.append(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}")
    if len(runs) > 4:
        runs = [*runs[:3], f"... {len(ordered)} in all"]
    return ", ".join(runs) or "none"


def _sentences(grid: Grid, holders: Sequence[Sequence[Slot]], num_spare_nodes: int) -> list[str]:
    survives = survival(grid, holders)
    at_once = "any one node" if survives.num_at_once == 1 else f"any {survives.num_at_once} nodes"
    spares = "1 spare makes" if num_spare_nodes == 1 else f"{num_spare_nodes} spares make"
    losses = "1 loss" if num_spare_nodes == 1 else f"{num_spare_nodes} losses in sequence"
    lines = [f"The state survives the loss of {at_once}; {spares} up for {losses}."]
    if survives.num_at_once == 1:
        share = survives.num_survivable_pairs / survives.num_pairs
        lines.append(
            f"Two nodes at once: it survives {survives.num_survivable_pairs} of "
            f"{survives.num_pairs} pairs ({share:.1%}), those where neither holds the only replica "
            "of a slot of the other."
        )
        if survives.num_survivable_pairs:
            lines.append(
                f"To go on after such a pair takes 2 spares ({num_spare_nodes} here) and a "
                "majority of all nodes left."
            )
    elsewhere = sum(
        not any(is_data_parallel_replica(grid, Slot(own), holder) for holder in kept_by)
        for own, kept_by in enumerate(holders)
    )
    if elsewhere:
        why = "data parallel is 1" if grid.data == 1 else "all data-parallel peers share their node"
        which = "Every slot's" if elsewhere == grid.world_size else f"{elsewhere} slots'"
        lines.append(
            f"{which} replica lies with another part of the model, because {why}: parameters are "
            "rebuilt from the replica and from no peer."
        )
    return lines
