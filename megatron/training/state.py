"""What the training loop counts: plain Python values, so that they travel as JSON without loss."""

from __future__ import annotations

import dataclasses
import math
from typing import Any


@dataclasses.dataclass(slots=True, kw_only=True)
class TrainState:
    """Counters of the training loop after its last completed iteration.

    `from_dict(json.loads(json.dumps(state.to_dict())))` equals `state`: Python prints floats with
    as many digits as it takes to read them back exactly.
    """

    iteration: int = 0
    """Completed iterations."""
    start_iteration: int = 0
    """Iterations completed when the job started: those of the checkpoint it loaded."""
    consumed_train_samples: int = 0
    skipped_train_samples: int = 0
    consumed_valid_samples: int = 0
    num_microbatches: int = 0
    """Microbatches of the last completed iteration; 0 before the first."""
    floating_point_operations: float = 0.0
    """Of all iterations so far, as Megatron-LM counts them."""
    skipped_iterations: int = 0
    """Since training began: iterations whose step was skipped (overflow in fp16)."""
    nan_iterations: int = 0
    interval_advanced: int = 0
    """This and the following: since the last log line."""
    interval_skipped: int = 0
    interval_nan: int = 0
    interval_losses: dict[str, float] = dataclasses.field(default_factory=dict)
    """Sums over the interval's iterations, by name."""
    last_metrics: dict[str, float] = dataclasses.field(default_factory=dict)
    """Of the last completed iteration: learning rate, gradient norm and what else is printed."""

    def to_dict(self) -> dict[str, Any]:
        """A JSON-able dict that `from_dict` reads back."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> TrainState:
        """The state that `to_dict` gave. Raises TypeError on a key that is not known."""
        copied: dict[str, Any] = {
            key: dict(value) if isinstance(value, dict) else value for key, value in values.items()
        }
        return cls(**copied)

    def complete_iteration(
        self,
        *,
        losses: dict[str, float],
        auxiliary: dict[str, float],
        updated: bool,
        metrics: dict[str, float],
        batch_size: int,
        num_microbatches: int,
        operations: float,
    ) -> None:
        """Count one more iteration. A skipped step's losses do not enter the interval's sums."""
        self.iteration += 1
        self.consumed_train_samples += batch_size
        self.num_microbatches = num_microbatches
        self.floating_point_operations += operations
        self.last_metrics = metrics
        if updated:
            self.interval_advanced += 1
        else:
            self.skipped_iterations += 1
            self.interval_skipped += 1
            if not all(math.isfinite(loss) for loss in losses.values()):
                self.nan_iterations += 1
                self.interval_nan += 1
        summed = {**losses, **auxiliary} if updated else auxiliary
        for name, value in summed.items():
            self.interval_losses[name] = self.interval_losses.get(name, 0.0) + value

    def reset_interval(self) -> None:
        """Begin a new log interval. The names of the losses stay, as their order is the line's."""
        self.interval_advanced = self.interval_skipped = self.interval_nan = 0
        self.interval_losses = dict.fromkeys(self.interval_losses, 0.0)
