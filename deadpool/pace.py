"""How often snapshots are taken, and what each cost: pure bookkeeping of guardian and trainer.

A snapshot passes through windows: capture (live tensors to own host memory), replicate (to the
holders' memory), commit (until that of every slot is staged). All of it is to fit into the compute
until the next capture; what does not is waited for there, the exposed stall.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections import deque

from deadpool.protocol import events as e
from deadpool.protocol.types import Iteration

AGREE_EVERY = 8
"""Iterations between two agreements on an automatic interval: at multiples of it."""

MAX_INTERVAL = 64

_FILL = 0.9
"""How much of the time between captures a copy may take before it is given more."""

_FILL_AFTER = 0.6
"""How much it may take of a shorter interval before that is chosen: no flapping."""

_REMEMBERED = 8


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Windows:
    """Of one snapshot of one slot, in seconds."""

    iteration: Iteration
    capture_s: float
    replicate_s: float
    commit_s: float
    stall_s: float
    """What the step that waited for it could not hide."""

    @property
    def copy_s(self) -> float:
        """From the end of the optimizer's step to the commit, but for the stall's own end."""
        return self.capture_s + self.replicate_s + self.commit_s


def most_iterations_rerun(interval: int) -> int:
    """Completed iterations that a loss can cost: it can come just before the commit that the
    next capture waits for, with all but one iteration of that interval done."""
    return 2 * interval - 1


def choose_interval(*, copy_s: float, iteration_s: float, current: int) -> int:
    """The shortest interval, in iterations, that hides a copy of `copy_s` seconds.

    iteration_s: an iteration's time without stalls."""
    if iteration_s <= 0:
        return current
    needed = _clamp(copy_s / (_FILL * iteration_s))
    if needed >= current:
        return needed
    return min(current, _clamp(copy_s / (_FILL_AFTER * iteration_s)))


def _clamp(ratio: float) -> int:
    return min(MAX_INTERVAL, max(1, math.ceil(ratio)))


class Pace:
    """A trainer's: which iterations are captured, and the figures of the last ones.

    interval: every so many iterations; None: chosen as training goes, from what copies take. All
    slots must agree: `wanted` is this one's opinion, `adopt` takes what was agreed.
    """

    def __init__(self, interval: int | None) -> None:
        self.is_auto = interval is None
        self.interval = interval or 1
        self._copies: deque[float] = deque(maxlen=_REMEMBERED)
        self._iterations: deque[float] = deque(maxlen=_REMEMBERED)
        self._since_told: list[Windows] = []

    def is_due(self, iteration: int) -> bool:
        """Whether the state after `iteration` is captured."""
        return iteration % self.interval == 0

    def note(self, windows: Windows) -> None:
        self._copies.append(windows.copy_s)
        self._since_told.append(windows)

    def note_iteration(self, seconds: float) -> None:
        """Of one iteration, without its stall."""
        self._iterations.append(seconds)

    def wanted(self) -> int:
        if not self._copies or not self._iterations:
            return self.interval
        return choose_interval(
            copy_s=statistics.median(self._copies),
            iteration_s=statistics.median(self._iterations),
            current=self.interval,
        )

    def adopt(self, interval: int) -> str:
        """What to tell a person; empty where nothing changes."""
        before, self.interval = self.interval, interval
        if before == interval:
            return ""
        every = "every iteration" if interval == 1 else f"every {interval} iterations"
        words = f"snapshots are taken {every}"
        if self._copies and self._iterations:
            copy, iteration = statistics.median(self._copies), statistics.median(self._iterations)
            words += f": here a copy takes {copy:.3g} s, an iteration {iteration:.3g} s"
        most = most_iterations_rerun(interval)
        return f"{words}; a loss costs at most {most} completed iteration{'s' if most > 1 else ''}"

    def restore(self, interval: int) -> None:
        """As it was when the snapshot was taken that training goes on from."""
        self.interval = interval if self.is_auto else self.interval
        self._copies.clear()
        self._iterations.clear()

    def metrics(self) -> dict[str, float]:
        """Means since the last call, in milliseconds, by the names of the log line."""
        told, self._since_told = self._since_told, []
        if not told:
            return {}
        return {
            f"snapshot {name} (ms)": 1e3 * statistics.fmean(getattr(w, f"{name}_s") for w in told)
            for name in ("capture", "replicate", "commit", "stall")
        }


class SnapshotClock:
    """A guardian's: when each of its slot's snapshots was captured and staged."""

    def __init__(self) -> None:
        self._captured: dict[Iteration, float] = {}
        self._staged: dict[Iteration, float] = {}

    def see(self, event: e.Event, now: float) -> None:
        match event:
            case e.Captured(iteration=iteration):
                self._captured[iteration] = now
            case e.PutDone(iteration=iteration):
                self._staged[iteration] = now

    def committed(self, iteration: Iteration, now: float) -> tuple[float, float]:
        """Seconds of replication and of the commit; zeros for what was not captured in this epoch.
        Forgets what is older."""
        captured, staged = self._captured.get(iteration), self._staged.get(iteration)
        for times in (self._captured, self._staged):
            for old in [i for i in times if i <= iteration]:
                del times[old]
        if captured is None or staged is None:
            return 0.0, 0.0
        return staged - captured, now - staged
