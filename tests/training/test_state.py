"""Counters, generator states and sample order: what a run is rebuilt from."""

from __future__ import annotations

import json
import random
from itertools import islice
from typing import Any

import numpy as np
import pytest
import rank_programs
import torch

from megatron.training import rng
from megatron.training.sampling import SampleOrder
from megatron.training.state import TrainState


def test_train_state_survives_json_to_the_bit() -> None:
    state = TrainState(iteration=7, consumed_train_samples=112, floating_point_operations=1.1e19)
    state.complete_iteration(
        losses={"lm loss": 0.1 + 0.2},
        auxiliary={"load_balancing_loss": 1 / 3},
        updated=True,
        metrics={"grad-norm": 2.0000000000000004},
        batch_size=16,
        num_microbatches=4,
        operations=3.3e17,
    )

    again = TrainState.from_dict(json.loads(json.dumps(state.to_dict())))

    assert again == state
    again.interval_losses["lm loss"] = 0.0
    assert state.interval_losses["lm loss"] == 0.1 + 0.2


def test_rng_state_round_trip_repeats_every_generator(run_ranks: Any) -> None:
    assert run_ranks(1, repeat_draws) == [True]


def repeat_draws() -> bool:
    """Whether all generators draw the same again after `restore_rng_state`."""
    flags = [*rank_programs.SMALL, "--mock-data", "--split", "100,0,0", "--train-iters", "3"]
    rank_programs.train(flags)
    random.gauss(0, 1)
    np.random.normal()
    before = rng.collect_rng_state()
    first = _draw()
    after = rng.collect_rng_state()
    rng.restore_rng_state(before)
    assert {key: value.shape for key, value in before.items()} == {
        key: value.shape for key, value in after.items()
    }
    return first == _draw()


def _draw() -> list[float]:
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    draws = [random.gauss(0, 1), random.random(), float(np.random.normal()), np.random.rand()]
    draws.append(torch.rand(()).item())
    for name in sorted(get_cuda_rng_tracker().get_states()):
        with get_cuda_rng_tracker().fork(name):
            draws.append(torch.rand(()).item())
    return draws


@pytest.mark.parametrize("shuffled", [False, True])
@pytest.mark.parametrize("data_sharding", [False, True])
def test_sample_order_continues_where_it_was_left(shuffled: bool, data_sharding: bool) -> None:
    def order(rank: int, consumed: int) -> SampleOrder:
        return SampleOrder(
            total_samples=50,
            consumed_samples=consumed,
            micro_batch_size=3,
            data_parallel_rank=rank,
            data_parallel_size=2,
            shuffled=shuffled,
            data_sharding=data_sharding,
        )

    for rank in range(2):
        whole = list(islice(order(rank, 0), 8))
        for step in range(1, 8):
            assert list(islice(order(rank, step * 6), 8 - step)) == whole[step:]
    seen = [index for rank in range(2) for batch in islice(order(rank, 0), 8) for index in batch]
    assert len(set(seen)) == len(seen) == 48


def test_sample_order_of_consumed_data_says_so() -> None:
    with pytest.raises(ValueError, match="all 50 samples"):
        SampleOrder(
            total_samples=50,
            consumed_samples=50,
            micro_batch_size=1,
            data_parallel_rank=0,
            data_parallel_size=1,
        )
