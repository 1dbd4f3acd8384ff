"""Faults on demand, for demonstrations and tests: `kill-node=1@iteration=7,phase=backward`."""

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


_FORM = "kill-node=NODE@iteration=ITERATION,phase=PHASE"


def parse_injection(spec: str) -> Injection:
    """Raises ValueError with what was given and what fits."""
    phases = ", ".join(phase.value for phase in InjectionPhase)
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

    def __init__(self, injections: tuple[Injection, ...], node: int, log_dir: str | None) -> None:
        self._due = [injection for injection in injections if injection.node == node]
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


def append_json_line(path: str, record: dict[str, object]) -> None:
    """One write, so that lines of several processes do not mix."""
    data = (json.dumps(record) + "\n").encode()
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    try:
        os.write(descriptor, data)
    finally:
        os.close(descriptor)
