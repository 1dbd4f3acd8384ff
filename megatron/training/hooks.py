"""The only door between the training loop and a fault-tolerance system.

The driver calls these methods at fixed points; it knows nothing of who answers. `NoHooks` is the
default: a plain torchrun job.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from megatron.training.trainer import Trainer


class Phase(enum.Enum):
    """Where in an iteration the rank is. Announced by the driver as it enters each."""

    DATA = "data"
    """Fetching the next microbatch."""
    FORWARD = "forward"
    """Forward pass of one microbatch (announced once per microbatch)."""
    BACKWARD = "backward"
    """Backward pass of one microbatch has reached this rank's output (once per microbatch)."""
    OPTIMIZER = "optimizer"
    """Just before `optimizer.step()`; gradients are reduced."""
    EVALUATE = "evaluate"
    """Evaluation after an iteration (at its start, then once per microbatch)."""
    SAVE = "save"
    """Writing a persistent checkpoint."""


class TrainingHooks(Protocol):
    """All methods are called on every rank, by the main thread."""

    def acquire_rank(self, args: Any) -> bool:
        """Block until this process has a rank in the grid; set RANK, WORLD_SIZE and LOCAL_RANK in
        `os.environ`. False: the job ended without needing this process, which then returns."""
        ...

    def create_process_groups(self, args: Any, create: Callable[..., None]) -> None:
        """Make every process group. `create(**init_process_group_overrides)` calls
        `torch.distributed.init_process_group` (keywords given here override the driver's own) and
        `parallel_state.initialize_model_parallel`."""
        ...

    def is_replacement(self) -> bool:
        """True on a process that takes over a rank of a job already running: the driver then must
        not call collectives or load a checkpoint during set-up; `on_ready` brings the state."""
        ...

    def on_ready(self, trainer: Trainer) -> None:
        """Model, optimizer, scheduler and data are built (and a checkpoint loaded)."""
        ...

    def on_phase(self, phase: Phase, microbatch: int | None = None) -> None:
        """The rank enters `phase`. `microbatch` counts from 0, None outside microbatches."""
        ...

    def after_step(self, trainer: Trainer, losses: dict[str, float]) -> None:
        """`optimizer.step()` returned, the scheduler stepped and `trainer.state` counts the
        iteration. `losses` (empty on ranks that do not compute the loss) are averages over the
        global batch."""
        ...

    def metrics(self) -> dict[str, float]:
        """Figures since the last call, by name, for the log line and TensorBoard."""
        ...

    def on_error(self, trainer: Trainer, error: BaseException) -> bool:
        """The iteration (or evaluation, or save) raised. True: `trainer` was brought back to an
        earlier `trainer.state.iteration`, training goes on from there; False: raise it."""
        ...

    def on_finished(self, trainer: Trainer) -> None:
        """This rank has nothing left to do. Returns when every rank says so; raises what
        `on_error` mends when another rank was lost meanwhile."""
        ...


class NoHooks:
    """Nothing watches: a failure ends the job, as in plain Megatron-LM."""

    def acquire_rank(self, args: Any) -> bool:
        return True

    def create_process_groups(self, args: Any, create: Callable[..., None]) -> None:
        create()

    def is_replacement(self) -> bool:
        return False

    def on_ready(self, trainer: Trainer) -> None:
        pass

    def on_phase(self, phase: Phase, microbatch: int | None = None) -> None:
        pass

    def after_step(self, trainer: Trainer, losses: dict[str, float]) -> None:
        pass

    def metrics(self) -> dict[str, float]:
        return {}

    def on_error(self, trainer: Trainer, error: BaseException) -> bool:
        return False

    def on_finished(self, trainer: Trainer) -> None:
        pass
