"""Who holds whose replica, and which spare takes which node's slots. Pure functions."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence

from deadpool.protocol.types import Holdings, Iteration, Member, MemberId, Node, Slot


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """Megatron's parallel sizes, as far as placement needs them."""

    world_size: int
    ranks_per_node: int
    tensor: int
    context: int
    pipeline: int
    pipeline_before_data: bool
    """True with --use-tp-pp-dp-mapping: pipeline ranks are adjacent, data-parallel ranks apart."""

    @property
    def data(self) -> int:
        return self.world_size // (self.tensor * self.context * self.pipeline)

    @property
    def num_nodes(self) -> int:
        return self.world_size // self.ranks_per_node

    def data_parallel_ring(self, slot: Slot) -> list[Slot]:
        """The data-parallel peers of `slot`, starting with the one after it, without itself.

        Order of ranks: tensor innermost, then context, data, pipeline (or pipeline, data).
        """
        inner = self.tensor * self.context
        stride = inner * (self.pipeline if self.pipeline_before_data else 1)
        position = (slot // stride) % self.data
        first = slot - position * stride
        return [Slot(first + ((position + k) % self.data) * stride) for k in range(1, self.data)]


def node_position(grid: Grid, slot: Slot) -> int:
    """Index of the group of slots that live and die together; a spare node takes a whole one."""
    return slot // grid.ranks_per_node


def choose_holders(grid: Grid) -> tuple[Slot, ...]:
    """For each slot, the slot whose member keeps its replica: the next data-parallel peer on
    another node; where all peers share the node, the same place on the next node.

    Raises ValueError where there is no other node.
    """
    if grid.num_nodes < 2:
        raise ValueError(
            f"{grid.world_size} ranks on one node: no other node can hold a replica, so the loss "
            "of the node would lose the training state"
        )
    holders = []
    for slot in map(Slot, range(grid.world_size)):
        here = node_position(grid, slot)
        for peer in grid.data_parallel_ring(slot):
            if node_position(grid, peer) != here:
                holders.append(peer)
                break
        else:
            holders.append(Slot((slot + grid.ranks_per_node) % grid.world_size))
    return tuple(holders)


def choose_spare(spares: Mapping[Node, Sequence[Member]], ranks_per_node: int) -> Node | None:
    """The complete spare node that waits longest (lowest member ids), or None."""
    complete = [
        (min(member.member for member in members), node)
        for node, members in spares.items()
        if len(members) == ranks_per_node
    ]
    return min(complete)[1] if complete else None


def choose_restore_point(
    slots: Iterable[tuple[Slot, MemberId]],
    holdings: Mapping[MemberId, Holdings],
) -> tuple[Iteration, dict[Slot, MemberId]] | None:
    """The newest iteration that every slot can be restored to, and where from.

    slots: each slot with its member in the coming epoch. A slot whose own member holds the
    snapshot needs no source; another is brought from the lowest member that holds its replica.
    None when no iteration is complete.
    """
    slots = list(slots)
    candidates = {i for h in holdings.values() for i in h.own}
    candidates |= {i for h in holdings.values() for _, i in h.replicas}
    for iteration in sorted(candidates, reverse=True):
        sources: dict[Slot, MemberId] = {}
        for slot, member in slots:
            if member in holdings and iteration in holdings[member].own:
                continue
            holders = [m for m, h in holdings.items() if (slot, iteration) in h.replicas]
            if not holders:
                break
            sources[slot] = min(holders)
        else:
            return iteration, sources
    return None
