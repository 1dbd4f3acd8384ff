"""Hooks that let iterations fail at chosen points and mend them from a copy in memory."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, ClassVar

import rank_programs
import torch

from megatron.training import rng
from megatron.training import trainer as trainer_module
from megatron.training.hooks import Phase
from megatron.training.state import TrainState


class InjectedError(RuntimeError):
    """The failure that the test asked for."""


class FailingHooks(rank_programs.Recording):
    """Raises at `points[iteration]`, once each, on every rank; restores what was copied last.

    The points are names of `PHASES` and `PATCHES`. All ranks fail at the same point, so that no
    message is under way and the process groups stay usable.
    """

    PHASES: ClassVar[dict[str, tuple[Phase, int | None]]] = {
        "data": (Phase.DATA, 0),
        "forward": (Phase.FORWARD, 1),
        "last-forward": (Phase.FORWARD, 3),
        "backward": (Phase.BACKWARD, 1),
        "last-backward": (Phase.BACKWARD, 3),
        "optimizer": (Phase.OPTIMIZER, None),
        "evaluate": (Phase.EVALUATE, None),
        "save": (Phase.SAVE, None),
    }

    def __init__(self, points: dict[int, str]) -> None:
        super().__init__()
        self.points = dict(points)
        self.happened: list[str] = []
        self.by_iteration: dict[int, float] = {}
        self.fresh: dict[str, Any] | None = None

    def fail_at(self, point: str) -> None:
        """Raise if the iteration under way (or just done) is to fail here."""
        done = self.trainer.state.iteration
        for iteration in (done, done + 1):
            at_end = point in ("evaluate", "save", "inside-evaluation", "after-step")
            if self.points.get(iteration) == point and (iteration == done) == at_end:
                del self.points[iteration]
                self.happened.append(point)
                raise InjectedError(f"{point} of iteration {iteration}")

    def on_ready(self, trainer: Any) -> None:
        super().on_ready(trainer)
        self._patch(trainer)
        self._copy = copy_state(trainer)

    def on_phase(self, phase: Phase, microbatch: int | None = None) -> None:
        for point, where in self.PHASES.items():
            if where == (phase, microbatch):
                self.fail_at(point)

    def after_step(self, trainer: Any, losses: dict[str, float]) -> None:
        self.by_iteration[trainer.state.iteration] = losses.get("lm loss", float("nan"))
        self._copy = copy_state(trainer)
        self.fail_at("after-step")

    def on_error(self, trainer: Any, error: BaseException) -> bool:
        if not isinstance(error, InjectedError):
            return False
        trainer.discard_partial_iteration()
        # Comparing losses is not enough: a handle left from the failed attempt delivers the right
        # gradients here, as the attempt was the same and its peers were alive.
        now, fresh = transient_state(trainer), self.fresh or {}
        assert now == fresh, {k: (now[k], fresh[k]) for k in now if now[k] != fresh[k]}
        restore_state(trainer, self._copy)
        return True

    def _patch(self, trainer: Any) -> None:
        """Points inside functions of megatron-core."""
        optimizer, scheduler = trainer.optimizer, trainer.scheduler
        optimizer.step = self._around(optimizer.step, "before-optimizer", "after-optimizer")
        scheduler.step = self._around(scheduler.step, "before-scheduler", "after-scheduler")
        trainer_module.finalize_model_grads = self._around(
            trainer_module.finalize_model_grads, "before-reduce", "after-reduce"
        )
        trainer.model[0].zero_grad_buffer = self._noting_fresh(trainer.model[0].zero_grad_buffer)
        gpt = trainer_module.transient.unwrap(trainer.model[0])
        layer = gpt.decoder.layers[1]
        layer.register_forward_hook(lambda *_: self._inside_layer(trainer))
        weight = gpt.decoder.layers[2].self_attention.linear_qkv.weight
        weight.register_hook(lambda gradient: self._counted("inside-backward", 4))

    def _noting_fresh(self, zero_grad_buffer: Callable[[], None]) -> Callable[[], None]:
        """Note megatron-core's state when the first iteration begins."""

        def noting() -> None:
            if self.fresh is None:
                self.fresh = transient_state(self.trainer)
            zero_grad_buffer()

        return noting

    def _inside_layer(self, trainer: Any) -> None:
        if trainer.model[0].training:
            self._counted("inside-forward", 3)
        else:
            self.fail_at("inside-evaluation")

    def _counted(self, point: str, call: int) -> None:
        """Fail at the `call`-th time in the iteration."""
        key = (point, self.trainer.state.iteration)
        self._calls = getattr(self, "_calls", {})
        self._calls[key] = self._calls.get(key, 0) + 1
        if self._calls[key] == call:
            self.fail_at(point)

    def _around(self, function: Callable[..., Any], before: str, after: str) -> Callable[..., Any]:
        def failing(*args: Any, **kwargs: Any) -> Any:
            self.fail_at(before)
            result = function(*args, **kwargs)
            self.fail_at(after)
            return result

        return failing


def transient_state(trainer: Any) -> dict[str, Any]:
    """Everything plain that megatron-core keeps in its objects, and whether gradients are zero."""
    state: dict[str, Any] = {}
    for index, chunk in enumerate(trainer.model):
        state[f"chunk{index}"] = _plain(chunk)
        state[f"chunk{index}/training"] = [module.training for module in chunk.modules()]
        state[f"chunk{index}/pre-hooks"] = [len(m._forward_pre_hooks) for m in chunk.modules()]
        for number, group in enumerate(chunk.bucket_groups + chunk.expert_parallel_bucket_groups):
            state[f"chunk{index}/group{number}"] = _plain(group)
        for buffer in chunk.buffers + chunk.expert_parallel_buffers:
            assert not buffer.grad_data.any()
        for parameter in chunk.parameters():
            assert parameter.grad is None
            assert not parameter.grad_added_to_main_grad
    state["config"] = _plain(trainer.config)
    return state


def _plain(instance: Any) -> dict[str, Any]:
    """Attributes by value where they are plain, by whether they are set otherwise."""
    changing = {"cached_grad_buffer_shard_list", "cached_param_buffer_shard_list", "timers"}
    return {
        name: value
        if isinstance(value, (bool, int, float, str, type(None)))
        else len(value)
        if isinstance(value, (list, dict))
        else True
        for name, value in vars(instance).items()
        if name not in changing
    }


def _tensors(trainer: Any) -> list[torch.Tensor]:
    """Parameters and buffers. DistributedDataParallel's own `buffers` is something else."""
    inner = [trainer_module.transient.unwrap(chunk) for chunk in trainer.model]
    return [tensor for gpt in inner for tensor in (*gpt.parameters(), *gpt.buffers())]


def _main_parameters(one: Any) -> list[torch.Tensor]:
    return [p for group in one.optimizer.param_groups for p in group["params"]]


def copy_state(trainer: Any) -> dict[str, Any]:
    """Everything that training depends on between iterations."""
    return {
        "tensors": [tensor.detach().clone() for tensor in _tensors(trainer)],
        "inner": [
            (
                [p.detach().clone() for p in _main_parameters(one)],
                copy.deepcopy(one.optimizer.state_dict()),
                None if one.grad_scaler is None else copy.deepcopy(one.grad_scaler.state_dict()),
            )
            for one in trainer.optimizer.chained_optimizers
        ],
        "scheduler": trainer.scheduler.state_dict(),
        "state": trainer.state.to_dict(),
        "rng": rng.collect_rng_state(),
    }


def restore_state(trainer: Any, saved: dict[str, Any]) -> None:
    """Put `copy_state`'s copy back."""
    with torch.no_grad():
        for tensor, value in zip(_tensors(trainer), saved["tensors"], strict=True):
            tensor.copy_(value)
        for one, (main, inner, scaler) in zip(
            trainer.optimizer.chained_optimizers, saved["inner"], strict=True
        ):
            for parameter, value in zip(_main_parameters(one), main, strict=True):
                parameter.copy_(value)
            one.optimizer.load_state_dict(copy.deepcopy(inner))
            if scaler is not None:
                one.grad_scaler.load_state_dict(copy.deepcopy(scaler))
            if hasattr(one, "_copy_main_params_to_model_params"):
                one._copy_main_params_to_model_params()
    if trainer.args.use_distributed_optimizer:
        for chunk in trainer.model:
            chunk.start_param_sync(force_sync=True)
    # Loading steps the schedule on from where it is.
    trainer.scheduler.num_steps = 0
    trainer.scheduler.load_state_dict(saved["scheduler"])
    trainer.state = TrainState.from_dict(saved["state"])
    rng.restore_rng_state(saved["rng"])


def train_failing(flags: list[str], points: dict[int, str]) -> dict[str, Any]:
    """Losses by iteration, the final parameters' hash, and the failures that happened."""
    hooks = FailingHooks(points)
    rank_programs.start(flags, hooks)
    return {
        "losses": hooks.by_iteration,
        "hash": rank_programs.parameter_hash(hooks.trainer.model),
        "happened": hooks.happened,
        "left": hooks.points,
        "state": hooks.trainer.state.to_dict(),
    }
