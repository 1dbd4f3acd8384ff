"""Faults on demand, for demonstrations and tests: `kill-node=1@iteration=7,phase=backward`,
`flip-replica=0@iteration=6`."""

from __future__ import annotations

import dataclasses
import enum
import json
import os
import re
import signal
import time


class InjectionPhase(enum.Enum):
    """When in an iteration a node dies."""

    FORWARD = "forward"
    """At the start of the last microbatch's forward pass."""
    BACKWARD = "backward"
    """When the first backward pass reaches the rank."""
    OPTIMIZER = "optimizer"
    """Inside the optimizer's step: its own parameters are updated, not yet gathered."""
    CAPTURE = "capture"
    """When half of the state is copied to host memory."""
    REPLICATE = "replicate"
    """When half of the replica is on its way to the neighbour."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Injection:
    """Kill `node` whole when one of its ranks is in `phase` of `iteration`.

    The snapshot phases of iteration i follow its optimizer step.
    """

    node: int
    iteration: int
    phase: InjectionPhase

    @property
    def name(self) -> str:
        return "kill-node"


class Copy(enum.Enum):
    """Which copy of a slot's snapshot is damaged."""

    SNAPSHOT = "snapshot"
    """Each rank's own, once its replica is staged."""
    REPLICA = "replica"
    """Those that the node keeps for others, once they have come in."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Flip:
    """Flip a bit in the middle of the copies of `iteration` in `node`'s memory."""

    node: int
    iteration: int
    copy: Copy

    @property
    def name(self) -> str:
        return f"flip-{self.copy.value}"


_FORM = (
    "kill-node=NODE@iteration=ITERATION,phase=PHASE, flip-snapshot=NODE@iteration=ITERATION or "
    "flip-replica=NODE@iteration=ITERATION"
)


def parse_injection(spec: str) -> Injection | Flip:
    """Raises ValueError with what was given and what fits."""
    phases = ", ".join(phase.value for phase in InjectionPhase)
    flip = re.fullmatch(r"flip-(snapshot|replica)=(\d+)@iteration=(\d+)", spec)
    if flip is not None:
        copy, node, iteration = flip.groups()
        return Flip(node=int(node), iteration=int(iteration), copy=Copy(copy))
    match = re.fullmatch(r"kill-node=(\d+)@iteration=(\d+),phase=([\w-]+)", spec)
    if match is None:
        raise ValueError(f"{spec!r}: the form is {_FORM}, with a phase of {phases}")
    node, iteration, phase = match.groups()
    if phase not in {p.value for p in InjectionPhase}:
        raise ValueError(f"{spec!r}: no phase {phase!r}; phases are {phases}")
    if int(iteration) < 1:
        raise ValueError(f"{spec!r}: iterations count from 1")
    return Injection(node=int(node), iteration=int(iteration), phase=InjectionPhase(phase))


class Injector:
    """Carries out the injections that concern this process's node."""

    def __init__(
        self, injections: tuple[Injection | Flip, ...], node: int, log_dir: str | None
    ) -> None:
        here = [injection for injection in injections if injection.node == node]
        self._due = [injection for injection in here if isinstance(injection, Injection)]
        self._flips = [injection for injection in here if isinstance(injection, Flip)]
        self._node = node
        self._log_dir = log_dir

    def is_due(self, iteration: int, phase: InjectionPhase) -> bool:
        return any(i.iteration == iteration and i.phase is phase for i in self._due)

    def is_due_in(self, phase: InjectionPhase) -> bool:
        """Whether any iteration of this node ends in `phase`."""
        return any(i.phase is phase for i in self._due)

    def fire(self, iteration: int, phase: InjectionPhase) -> None:
        """Kill every process of this node, if that is due: SIGKILL to the process group, which
        the local launcher makes one for each node. Writes the moment down first."""
        if not self.is_due(iteration, phase):
            return
        if self._log_dir is not None:
            append_json_line(
                os.path.join(self._log_dir, "injections.jsonl"),
                {
                    "node": self._node,
                    "iteration": iteration,
                    "phase": phase.value,
                    "monotonic_s": time.monotonic(),
                },
            )
        os.killpg(os.getpgrp(), signal.SIGKILL)

    def flip(self, copy: Copy, iteration: int, payload: memoryview) -> None:
        """Damage a copy once, if that is due, and write it down."""
        due = [x for x in self._flips if (x.copy, x.iteration) == (copy, iteration)]
        if not due or not len(payload):
            return
        payload[len(payload) // 2] ^= 1
        self._flips = [x for x in self._flips if x not in due]
        if self._log_dir is not None:
            append_json_line(
                os.path.join(self._log_dir, "injections.jsonl"),
                {"node": self._node, "iteration": iteration, "flip": copy.value},
            )


def append_json_line(path: str, record: dict[str, object]) -> None:
    """One write, so that lines of several processes do not mix."""
    data = (json.dumps(record) + "\n").encode()
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    try:
        os.write(descriptor, data)
    finally:
        os.close(descriptor)
