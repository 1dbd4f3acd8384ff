"""Megatron's optimizers, opened and put back: real training, compared with an undisturbed run."""

from __future__ import annotations

import json
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash

from deadpool.arena import Arena
from deadpool.optimizer import (
    initialize_state,
    leaf_optimizers,
    load_scalar_state,
    patch_inner_step,
    patch_step,
    rebuild_parameters,
    scalar_state,
    shard_tensors,
)
from deadpool.protocol.types import Iteration, Slot
from deadpool.snapshot import Snapshotter
from megatron.training.hooks import NoHooks
from megatron.training.rng import collect_rng_state, restore_rng_state
from megatron.training.state import TrainState

RunRanks = Callable[..., list[Any]]

FLAGS = """
    --num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 32
    --max-position-embeddings 32 --micro-batch-size 2 --global-batch-size 8 --train-iters 5
    --lr 1e-2 --min-lr 1e-3 --lr-decay-style cosine --lr-warmup-iters 2 --weight-decay 0.1
    --clip-grad 1.0 --tokenizer-type NullTokenizer --vocab-size 128 --transformer-impl local
    --distributed-backend gloo --log-interval 1 --eval-iters 0 --eval-interval 1000 --seed 1234
    --num-workers 0 --mock-data --split 100,0,0
""".split()

CONFIGURATIONS = {
    "fp32": (1, "--use-distributed-optimizer"),
    "fp32-plain": (1, ""),
    "bf16": (1, "--use-distributed-optimizer --bf16"),
    "bf16-plain": (1, "--bf16"),
    "fp16": (
        1,
        "--use-distributed-optimizer --fp16 --initial-loss-scale 4096 --loss-scale-window 2",
    ),
    "moe": (1, "--use-distributed-optimizer --num-experts 2 --disable-bias-linear"),
    "sgd": (1, "--optimizer sgd"),
    "sharded-bf16": (2, "--use-distributed-optimizer --bf16"),
}


class Recording(NoHooks):
    """Losses, and a hash of everything the optimizer owns, after each iteration."""

    def __init__(self) -> None:
        self.history: list[tuple[int, dict[str, str], int, int, str]] = []

    def after_step(self, trainer: Any, losses: dict[str, float]) -> None:
        self.history.append(
            (
                trainer.state.iteration,
                {name: value.hex() for name, value in losses.items()},
                hash_all(p for chunk in trainer.model for p in chunk.parameters()),
                hash_all(owned_tensors(trainer.optimizer)),
                json.dumps(scaler_states(trainer.optimizer)),
            )
        )


def owned_tensors(optimizer: Any) -> list[torch.Tensor]:
    """Main parameters and moments, found without `deadpool.optimizer`."""
    tensors = []
    for leaf in getattr(optimizer, "chained_optimizers", [optimizer]):
        for group in leaf.optimizer.param_groups:
            for parameter in group["params"]:
                tensors.append(parameter)
                state = leaf.optimizer.state[parameter]
                tensors += [v for _, v in sorted(state.items()) if isinstance(v, torch.Tensor)]
    return tensors


def scaler_states(optimizer: Any) -> list[Any]:
    leaves = getattr(optimizer, "chained_optimizers", [optimizer])
    return [
        {k: float(v) for k, v in leaf.grad_scaler.state_dict().items()}
        for leaf in leaves
        if getattr(leaf, "grad_scaler", None) is not None
    ]


def hash_all(tensors: Any) -> int:
    """Tensors of zeros do not count: moments that are not there yet are worth as much."""
    digest = xxhash.xxh3_64()
    for tensor in tensors:
        if not tensor.any():
            continue
        flat = tensor.detach().contiguous().view(-1).view(torch.uint8)
        digest.update(flat.numpy().tobytes())
    return digest.intdigest()


def start(flags: list[str], hooks: Any) -> None:
    import os

    from megatron.training.arguments import parse_args, validate_args
    from megatron.training.pretrain import pretrain

    args = parse_args(flags)
    validate_args(args, int(os.environ["WORLD_SIZE"]))
    pretrain(args, hooks)


def train(flags: list[str]) -> list[Any]:
    hooks = Recording()
    start(flags, hooks)
    return hooks.history


class Restored(RuntimeError):
    """Thrown after an iteration, to make the driver ask `on_error`."""


class RollingBack(Recording):
    """Takes a snapshot after iteration 2, spoils everything after 4, restores, runs on."""

    def on_ready(self, trainer: Any) -> None:
        self.arena = Arena.create()
        self.snapshots = Snapshotter(
            arena=self.arena,
            slot=Slot(0),
            model=trainer.model,
            optimizer=trainer.optimizer,
            collect_random=collect_rng_state,
            restore_random=restore_rng_state,
            on_captured=lambda iteration, buffer: None,
            on_halfway=lambda iteration: None,
        )
        self.names = list(shard_tensors(trainer.optimizer))
        self.is_restored = False

    def after_step(self, trainer: Any, losses: dict[str, float]) -> None:
        super().after_step(trainer, losses)
        iteration = trainer.state.iteration
        if self.is_restored:
            return
        if iteration == 2:
            self.snapshots.capture_tensors(Iteration(2))
            metadata = {
                "state": trainer.state.to_dict(),
                "scheduler": trainer.scheduler.state_dict(),
            }
            self.snapshots.seal(Iteration(2), metadata)
        if iteration == 4:
            self.spoil(trainer)
            raise Restored

    def spoil(self, trainer: Any) -> None:
        """As if the process were another one of the same layout."""
        assert list(shard_tensors(trainer.optimizer)) == self.names
        with torch.no_grad():
            for tensor in owned_tensors(trainer.optimizer):
                tensor.fill_(3.25)
            for chunk in trainer.model:
                for parameter in chunk.parameters():
                    parameter.fill_(1.5)
        for leaf in leaf_optimizers(trainer.optimizer):
            for group in leaf.optimizer.param_groups:
                group["lr"] = 77.0
        torch.manual_seed(99)

    def on_error(self, trainer: Any, error: BaseException) -> bool:
        if not isinstance(error, Restored):
            return False
        self.is_restored = True
        trainer.discard_partial_iteration()
        buffer = self.arena.find(Iteration(2))
        assert buffer is not None
        self.snapshots.load_tensors(buffer)
        metadata = self.snapshots.load_rest(buffer)
        trainer.state = TrainState.from_dict(metadata["state"])
        trainer.scheduler.num_steps = 0
        trainer.scheduler.load_state_dict(metadata["scheduler"])
        rebuild_parameters(trainer.model, trainer.optimizer)
        self.restored = (
            hash_all(p for chunk in trainer.model for p in chunk.parameters()),
            hash_all(owned_tensors(trainer.optimizer)),
        )
        return True


def roll_back(flags: list[str]) -> tuple[list[Any], tuple[int, int]]:
    hooks = RollingBack()
    start(flags, hooks)
    return hooks.history, hooks.restored


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_state_restored_after_two_steps_repeats_the_rest_to_the_bit(
    run_ranks: RunRanks, tmp_path: Path, name: str
) -> None:
    world_size, extra = CONFIGURATIONS[name]
    flags = [*FLAGS, *extra.split(), "--data-cache-path", str(tmp_path / "cache")]
    undisturbed_by_rank = run_ranks(world_size, train, flags)
    rolled_by_rank = run_ranks(world_size, roll_back, flags)
    for undisturbed, (history, restored) in zip(undisturbed_by_rank, rolled_by_rank, strict=True):
        assert [entry[0] for entry in undisturbed] == [1, 2, 3, 4, 5]
        # The first steps are the same although the moments were there before the first one;
        # iterations 3 and 4 were run twice.
        assert history == undisturbed[:4] + undisturbed[2:]
        assert restored == undisturbed[1][2:4]
        parameters = [entry[2] for entry in undisturbed]
        assert len(set(parameters)) >= 3, "training was meant to change something"
    if name == "fp16":
        scales = [json.loads(entry[4])[0]["scale"] for entry in undisturbed_by_rank[0]]
        assert len(set(scales)) > 1, "the loss scale was meant to move"


# Alone, with torch's optimizers in Megatron's shape


def leaf(optimizer: Any, **more: Any) -> Any:
    return types.SimpleNamespace(optimizer=optimizer, init_state_fn=None, config=None, **more)


def parameters(number: int, seed: int = 5) -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.nn.Parameter(torch.randn(4, generator=generator)) for _ in range(number)]


def test_shard_tensors_of_a_chain_name_every_owned_tensor_once() -> None:
    adam, sgd = parameters(3), parameters(2)
    chain = types.SimpleNamespace(
        chained_optimizers=[
            leaf(torch.optim.AdamW([{"params": adam[:1]}, {"params": adam[1:]}])),
            leaf(None),  # A rank that owns none of its parameters.
            leaf(torch.optim.SGD(sgd, lr=0.1, momentum=0.9)),
        ]
    )
    initialize_state(chain)
    tensors = shard_tensors(chain)
    assert len(tensors) == 3 * 4 + 2 * 2
    assert len({t.data_ptr() for t in tensors.values()}) == len(tensors)
    for parameter in adam + sgd:
        assert sum(t.data_ptr() == parameter.data_ptr() for t in tensors.values()) == 1
    assert len(scalar_state(chain)) == 2


def test_shard_tensors_keep_their_names_through_training() -> None:
    """Names are equal on all members of a slot, whenever they are asked for."""
    owned = parameters(2)
    optimizer = leaf(torch.optim.AdamW(owned))
    initialize_state(optimizer)
    before = list(shard_tensors(optimizer))
    for parameter in owned:
        parameter.grad = torch.ones(4)
    optimizer.optimizer.step()
    assert list(shard_tensors(optimizer)) == before


def test_scalar_state_as_json_comes_back() -> None:
    optimizer, other = (leaf(torch.optim.AdamW(parameters(2), lr=lr)) for lr in (0.125, 0.5))
    optimizer.optimizer.param_groups[0]["wd_mult"] = 0.0
    first = optimizer.optimizer.param_groups[0]["params"][0]
    states = json.loads(json.dumps(scalar_state(optimizer)))
    load_scalar_state(other, states)
    assert other.optimizer.param_groups[0]["lr"] == 0.125
    assert other.optimizer.param_groups[0]["wd_mult"] == 0.0
    assert other.optimizer.param_groups[0]["params"][0] is not first


def test_scalar_state_of_another_chain_is_refused() -> None:
    one = leaf(torch.optim.AdamW(parameters(1)))
    two = types.SimpleNamespace(chained_optimizers=[leaf(torch.optim.AdamW(parameters(1)))] * 2)
    with pytest.raises(ValueError):
        load_scalar_state(two, scalar_state(one))


def test_patched_step_calls_before_inside_and_after_in_order_and_returns_its_result() -> None:
    said: list[str] = []
    inner = types.SimpleNamespace(step=lambda: said.append("inner"))

    def step() -> str:
        inner.step()
        said.append("gather")
        return "stepped"

    optimizer = types.SimpleNamespace(optimizer=inner, step=step)
    patch_step(optimizer, before=lambda: said.append("before"), after=lambda: said.append("after"))
    patch_inner_step(optimizer, lambda: said.append("inside"))
    assert optimizer.step() == "stepped"
    assert said == ["before", "inner", "inside", "gather", "after"]


def test_patched_step_that_fails_is_not_captured() -> None:
    said: list[str] = []

    def step() -> None:
        raise RuntimeError("peer lost")

    optimizer = types.SimpleNamespace(step=step)
    patch_step(optimizer, before=lambda: said.append("before"), after=lambda: said.append("after"))
    with pytest.raises(RuntimeError, match="peer lost"):
        optimizer.step()
    assert said == ["before"]
