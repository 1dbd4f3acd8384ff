"""What test ranks run: a pretraining job from flags, recorded to the bit."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import signal
from typing import Any

import torch

from megatron.training import checkpoint_folder
from megatron.training.arguments import UsageError, parse_args, validate_args
from megatron.training.hooks import NoHooks
from megatron.training.pretrain import pretrain

SMALL = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 64 "
    "--max-position-embeddings 64 --micro-batch-size 2 --global-batch-size 16 --train-iters 6 "
    "--lr 1e-3 --min-lr 1e-4 --lr-decay-style cosine --lr-warmup-iters 2 --weight-decay 0.1 "
    "--clip-grad 1.0 --tokenizer-type NullTokenizer --vocab-size 256 --transformer-impl local "
    "--distributed-backend gloo --use-distributed-optimizer --log-interval 1 --eval-iters 0 "
    "--eval-interval 1000 --seed 1234 --num-workers 0"
).split()
"""Flags of a model that trains an iteration in a fraction of a second."""


@dataclasses.dataclass
class Recording(NoHooks):
    """Losses by iteration, exact, and the trainer for inspection."""

    losses: list[tuple[int, float]] = dataclasses.field(default_factory=list)
    trainer: Any = None

    def on_ready(self, trainer: Any) -> None:
        self.trainer = trainer

    def after_step(self, trainer: Any, losses: dict[str, float]) -> None:
        for value in losses.values():
            self.losses.append((trainer.state.iteration, value))


def start(flags: list[str], hooks: Any) -> int:
    """Parse, validate and run `flags` in this rank."""
    args = parse_args(flags)
    validate_args(args, int(os.environ["WORLD_SIZE"]))
    return pretrain(args, hooks)


def train(flags: list[str]) -> dict[str, Any]:
    """Losses by iteration on ranks that know them, and the final parameters' hash."""
    hooks = Recording()
    start(flags, hooks)
    return {"losses": hooks.losses, "hash": parameter_hash(hooks.trainer.model)}


def parameter_hash(model: list[Any]) -> str:
    """Of all parameters of this rank, to the bit."""
    digest = hashlib.sha256()
    for chunk in model:
        for name, parameter in chunk.named_parameters():
            digest.update(name.encode())
            digest.update(parameter.detach().cpu().contiguous().view(torch.uint8).numpy())
    return digest.hexdigest()


def train_killed_in_save(flags: list[str], iteration: int) -> bool:
    """Die by SIGKILL (in a child, so that the caller can tell) when `iteration` is published."""
    child = os.fork()
    if child == 0:
        publish = checkpoint_folder.publish

        def dying(root: str, at: int) -> None:
            if at == iteration:
                os.kill(os.getpid(), signal.SIGKILL)
            publish(root, at)

        checkpoint_folder.publish = dying
        train(flags)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    return os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL


def refusal(flags: list[str]) -> dict[str, Any]:
    """The message of the UsageError that `flags` end in, and whether groups existed then."""
    try:
        start(flags, Recording())
    except UsageError as error:
        return {"message": str(error), "groups": torch.distributed.is_initialized()}
    raise AssertionError("the flags were accepted")


def blend_counts(flags: list[str]) -> list[int]:
    """How many training samples come from each data set of the blend."""
    hooks = Recording()
    start(flags, hooks)
    blended = hooks.trainer.datasets.train
    picked = [int(blended.dataset_index[index]) for index in range(len(blended))]
    return [picked.count(number) for number in range(len(blended.datasets))]


def train_signalled(flags: list[str], iteration: int) -> int:
    """The iteration the job left at, when rank 1 alone gets SIGTERM after `iteration`."""

    class Signalled(Recording):
        def after_step(self, trainer: Any, losses: dict[str, float]) -> None:
            super().after_step(trainer, losses)
            if trainer.state.iteration == iteration and trainer.args.rank == 1:
                os.kill(os.getpid(), signal.SIGTERM)

    hooks = Signalled()
    start(flags, hooks)
    return hooks.trainer.state.iteration
