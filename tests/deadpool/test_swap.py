"""A node dies in each phase of an iteration; losses and parameters are an unfailed run's, bit for
bit."""

from __future__ import annotations

import dataclasses

import pytest

PHASES = ["forward", "backward", "optimizer", "capture", "replicate"]
ITERATIONS = ["--train-iters", "5"]


@dataclasses.dataclass(frozen=True)
class Grid:
    nodes: int
    ranks_per_node: int
    flags: str

    def launch(self, spares: int = 1, *more: str) -> list[str]:
        return [
            *("--nodes", str(self.nodes + spares), "--ranks-per-node", str(self.ranks_per_node)),
            *("--spare-nodes", str(spares), *more),
        ]

    def arguments(self, *more: str) -> list[str]:
        return [*self.flags.split(), *ITERATIONS, *more]


GRIDS = {
    # Data-parallel peers on different nodes: parameters come from a healthy peer.
    "pp2-dp2": Grid(2, 2, "--pipeline-model-parallel-size 2 --use-tp-pp-dp-mapping --bf16"),
    # Data-parallel peers on the same node: both shards come from the neighbours' memory.
    "pp2-dp2-peers-together": Grid(2, 2, "--pipeline-model-parallel-size 2"),
    "tp2-dp2": Grid(2, 2, "--tensor-model-parallel-size 2 --bf16"),
    "tp2-pp2-dp2": Grid(
        4, 2, "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --bf16"
    ),
    "moe-ep2": Grid(
        2,
        2,
        "--num-experts 4 --expert-model-parallel-size 2 --moe-router-topk 2 "
        "--moe-token-dispatcher-type alltoall --bf16",
    ),
}


# Node 0 holds slot 0 and the rendezvous store.
VICTIMS = [(name, node) for name, grid in GRIDS.items() for node in range(grid.nodes)]


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize(("name", "victim"), VICTIMS)
def test_kill_in_phase_continues_bit_identical(run_job, peace, name, victim, phase):
    grid = GRIDS[name]
    unfailed = peace(grid.launch(), grid.arguments())
    job = run_job(
        grid.launch(),
        grid.arguments(f"--deadpool-inject=kill-node={victim}@iteration=3,phase={phase}"),
    )
    job.check_clean()
    assert [(s["nodes_lost"], s["spares_used"]) for s in job.swaps] == [([victim], [grid.nodes])]
    assert job.swaps[0]["iterations_rerun"] <= 1
    assert job.losses == unfailed.losses
    assert job.parameters == unfailed.parameters
    assert len(job.parameters) == grid.nodes * grid.ranks_per_node
