"""Small worlds that searches begin with."""

from __future__ import annotations

from deadpool.simulation.search import run_quietly
from deadpool.simulation.world import NO_MISTAKES, Mistakes, World, small_grid


def training_world(
    *,
    slots: int = 2,
    spares: int = 1,
    last: int = 1,
    ranks_per_node: int = 1,
    replicas: int = 1,
    mistakes: Mistakes = NO_MISTAKES,
    **budget: int,
) -> World:
    """The first commit is made and heard. budget: `losses=1` and the like."""
    world = World(
        grid=small_grid(slots // ranks_per_node, ranks_per_node),
        num_spare_nodes=spares,
        last=last,
        replicas=replicas,
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
