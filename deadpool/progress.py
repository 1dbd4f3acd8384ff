"""Where a trainer is, as its guardian sees it, and when that is no progress any more.

The trainer writes a few bytes of shared memory at each phase of each microbatch; its guardian reads
them once a tick. Both ends are fork's: see `guardian.run_guardian`.
"""

from __future__ import annotations

import dataclasses
import enum
import mmap
import struct

from deadpool.protocol.types import Iteration


class Activity(enum.IntEnum):
    """What a trainer is in."""

    SETUP = 0
    """Imports, builds its model, or rejoins: the leader's bounds cover it."""
    FIRST = 1
    """Its first iteration, in which kernels may be compiled."""
    DATA = 2
    FORWARD = 3
    BACKWARD = 4
    OPTIMIZER = 5
    BETWEEN = 6
    """After the step: logging, and what its flags ask for."""
    EVALUATION = 7
    SAVING = 8
    """How long a file system takes has no bound here."""
    FINISHED = 9


_UNBOUNDED = frozenset({Activity.SETUP, Activity.SAVING, Activity.FINISHED})
_FORM = struct.Struct("<qBxxxxxxxQ")


@dataclasses.dataclass(frozen=True, slots=True)
class Reading:
    iteration: Iteration
    """That the trainer is in."""
    activity: Activity
    count: int
    """Grows with every sign of progress."""


class ProgressBoard:
    """One trainer's. `note` belongs to its main thread, `read` and `clear` to the guardian."""

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, mmap.PAGESIZE)
        self._count = 0

    def note(self, activity: Activity, iteration: int) -> None:
        """Progress. Less than a microsecond."""
        self._count += 1
        _FORM.pack_into(self._memory, 0, iteration, activity, self._count)

    def read(self) -> Reading:
        iteration, activity, count = _FORM.unpack_from(self._memory)
        return Reading(Iteration(iteration), Activity(activity), count)

    def clear(self) -> None:
        """A new trainer begins; none runs."""
        self._memory[: _FORM.size] = bytes(_FORM.size)


class Vigil:
    """Says when a trainer stalls. Bounds are in looks, of which there is one a tick: a guardian
    that was stopped itself does not find that its trainer was silent.

    hang: without progress. first: the same, in a process's first iteration. abort: for leaving
    what it is in, once an epoch was announced.
    """

    def __init__(self, *, hang: int, first: int, abort: int, tick_s: float) -> None:
        self._hang = hang
        self._first = first
        self._abort = abort
        self._tick_s = tick_s
        self._last: Reading | None = None
        self._unchanged = 0
        self._asked: int | None = None
        """Looks since an epoch was announced that is not answered."""

    def begin(self) -> None:
        """Of another trainer."""
        self._last, self._unchanged, self._asked = None, 0, None

    def announced(self) -> None:
        self._asked = 0

    def answered(self) -> None:
        self._asked = None
        self._unchanged = 0

    def look(self, reading: Reading) -> str:
        """Words if the trainer stalls, once in each bound; else none."""
        self._unchanged = 0 if reading != self._last else self._unchanged + 1
        self._last = reading
        if reading.activity in _UNBOUNDED:
            self._asked = None if self._asked is None else 0
            return ""
        where = f"{reading.activity.name.lower()} of iteration {reading.iteration}"
        is_first = reading.activity is Activity.FIRST
        if self._asked is not None:
            self._asked += 1
            bound = self._first if is_first else self._abort
            if self._asked <= bound:
                return ""
            self._asked = 0
            return f"it did not leave {where} within {bound * self._tick_s:g} s"
        bound = self._first if is_first else self._hang
        if self._unchanged < bound:
            return ""
        self._unchanged = 0
        return f"no progress for {bound * self._tick_s:g} s in {where}"
