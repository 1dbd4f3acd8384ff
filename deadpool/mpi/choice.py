"""Which transport a put goes by. Pure."""

from __future__ import annotations

import enum
import statistics

NUM_ROUNDS = 3
"""Puts of each that are timed."""


class Way(enum.Enum):
    TCP = "tcp"
    MPI = "mpi"


class Choice:
    """Of one guardian, for its own puts, for as long as it lives.

    measures: time both, take the faster; otherwise MPI wherever there is a world.
    """

    def __init__(self, *, measures: bool) -> None:
        self.verdict = None if measures else Way.MPI
        """None while it measures."""
        self._figures: dict[Way, list[float]] = {way: [] for way in Way}
        self.num_bytes = 0
        """Of the last put that was timed."""

    def pick(self, *, mpi_is_up: bool) -> Way:
        """In turns while it measures, which all slots take alike, as they share the machine."""
        if not mpi_is_up:
            return Way.TCP
        return self.verdict or min(Way, key=lambda way: len(self._figures[way]))

    def note(self, way: Way, num_bytes: int, seconds: float) -> bool:
        """A put that was made while the world was up, in a healthy epoch. Whether it decides."""
        if self.verdict is not None or num_bytes == 0:
            return False
        self.num_bytes = num_bytes
        self._figures[way].append(num_bytes / seconds / 1e9)
        if min(map(len, self._figures.values())) < NUM_ROUNDS:
            return False
        self.verdict = max(Way, key=self.gigabytes_per_s)
        return True

    def gigabytes_per_s(self, way: Way) -> float:
        """The median."""
        return statistics.median(self._figures[way])
