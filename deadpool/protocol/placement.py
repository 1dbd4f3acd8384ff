"""Who holds whose replica, who takes which slots, and what can be restored. Pure functions."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Iterable, Iterator, Mapping, Set

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

    def data_parallel_ring(self, slot: Slot) -> Iterator[Slot]:
        """The data-parallel peers of `slot`, starting with the one after it, without itself.

        Order of ranks: tensor innermost, then context, data, pipeline (or pipeline, data).
        """
        inner = self.tensor * self.context
        stride = inner * (self.pipeline if self.pipeline_before_data else 1)
        position = (slot // stride) % self.data
        first = slot - position * stride
        for k in range(1, self.data):
            yield Slot(first + ((position + k) % self.data) * stride)


def node_position(grid: Grid, slot: Slot) -> int:
    """Index of the group of slots that live and die together; a spare node takes a whole one."""
    return slot // grid.ranks_per_node


@functools.lru_cache(maxsize=8)  # Simulations have thousands of cores in one process.
def choose_holders(grid: Grid, replicas: int) -> tuple[tuple[Slot, ...], ...]:
    """For each slot, the slots whose members keep its replicas, each on a node of its own: the
    next data-parallel peers on other nodes; where those are too few, the same place on the next
    nodes.

    Raises ValueError where there are not so many other nodes.
    """
    if grid.num_nodes < 2:
        raise ValueError(
            f"{grid.world_size} ranks on one node: no other node can hold a replica, so the loss "
            "of the node would lose the training state"
        )
    if not 1 <= replicas < grid.num_nodes:
        raise ValueError(
            f"{replicas} replicas on {grid.num_nodes} nodes that train: each lies on another node, "
            f"so there can be 1 to {grid.num_nodes - 1}"
        )
    return tuple(
        tuple(itertools.islice(_holders_of(grid, slot), replicas))
        for slot in map(Slot, range(grid.world_size))
    )


def _holders_of(grid: Grid, slot: Slot) -> Iterator[Slot]:
    """One on each other node, in the order of preference."""
    used = {node_position(grid, slot)}
    next_nodes = (
        Slot((slot + k * grid.ranks_per_node) % grid.world_size) for k in range(1, grid.num_nodes)
    )
    for holder in itertools.chain(grid.data_parallel_ring(slot), next_nodes):
        node = node_position(grid, holder)
        if node not in used:
            used.add(node)
            yield holder


def assign_slots(
    grid: Grid,
    members: Iterable[Member],
    bound: Mapping[MemberId, Slot],
    trained: Set[MemberId],
) -> tuple[MemberId, ...] | None:
    """The member of each slot, indexed by slot; None where complete nodes are too few.

    members: the live ones; spares that come first are taken first. bound: slots that trainers were
    built for; such a trainer can take no other, and its whole node stays at its place. trained:
    members with state, preferred where two nodes were built for one place.
    """
    nodes: dict[Node, list[Member]] = {}
    for member in members:
        nodes.setdefault(member.node, []).append(member)
    places: dict[int, Node] = {}
    free: list[Node] = []
    for node, ranks in nodes.items():
        if len(ranks) != grid.ranks_per_node:
            continue
        place = next(
            (node_position(grid, bound[m.member]) for m in ranks if m.member in bound), None
        )
        if place is None:
            free.append(node)
        elif place not in places or any(m.member in trained for m in ranks):
            places[place] = node
    slots: list[MemberId] = []
    waiting = iter(free)
    for place in range(grid.num_nodes):
        found = places.get(place) if place in places else next(waiting, None)
        if found is None:
            return None
        slots += [m.member for m in sorted(nodes[found], key=lambda m: m.local_rank)]
    return tuple(slots)


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
    kept_by: dict[tuple[Slot, Iteration], MemberId] = {}
    for member in sorted(holdings, reverse=True):
        kept_by.update(dict.fromkeys(holdings[member].replicas, member))
    candidates = {i for h in holdings.values() for i in h.own} | {i for _, i in kept_by}
    for iteration in sorted(candidates, reverse=True):
        sources: dict[Slot, MemberId] = {}
        for slot, member in slots:
            if member in holdings and iteration in holdings[member].own:
                continue
            source = kept_by.get((slot, iteration))
            if source is None:
                break
            sources[slot] = source
        else:
            return iteration, sources
    return None


def newest_kept(
    world_size: int, holdings: Mapping[MemberId, Holdings], slot_of: Mapping[MemberId, Slot]
) -> tuple[Iteration, tuple[Slot, ...]] | None:
    """The newest iteration that memory holds whole, and the slots of it that only replicas hold.

    slot_of: members that hold own snapshots, and of which slot. None when none is complete.
    """
    own = {(slot_of[x], i) for x, h in holdings.items() if x in slot_of for i in h.own}
    kept = {each for h in holdings.values() for each in h.replicas}
    slots = [Slot(s) for s in range(world_size)]
    for iteration in sorted({i for _, i in own | kept}, reverse=True):
        orphans = tuple(s for s in slots if (s, iteration) not in own)
        if all((s, iteration) in kept for s in orphans):
            return iteration, orphans
    return None
