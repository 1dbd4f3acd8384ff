"""What a recovery cost, as a line for people and a record for programs."""

from __future__ import annotations

import dataclasses
import json
import os
import time
from collections.abc import Sequence
from typing import Any

from deadpool.injection import append_json_line
from deadpool.protocol import events as e
from deadpool.protocol import messages as m
from deadpool.protocol.types import STALLED, Node, Phase
from deadpool.terminal import say

STAGES = ("detect", "abort", "agree", "setup", "regroup", "restore", "verify", "first_step")
"""detect: death to announcement. abort: until every survivor stands outside its collectives.
agree: news of plan and readiness, as far as no stage covers it. setup: the spare builds its slot's
model. regroup: process groups built. restore: state loaded and parameters gathered. verify: hashes
compared. first_step: the next optimizer step done. Each is the slowest member's; setup and regroup
overlap."""


@dataclasses.dataclass(slots=True, kw_only=True)
class SwapReport:
    """Collected by the leader from its clock and the members' `Ready` and `FirstStep`.

    Times are of time.monotonic, in seconds.
    """

    epoch: int
    lost_at: float
    """First news of the loss, or of a connection's end."""
    announced_at: float
    nodes_lost: list[Node] = dataclasses.field(default_factory=list)
    """None: nobody was replaced."""
    respawned: dict[Node, str] = dataclasses.field(default_factory=dict)
    """Nodes on which a trainer was started anew, and the signal that had ended it."""
    spares_used: list[Node] = dataclasses.field(default_factory=list)
    restored_iteration: int | None = None
    seconds: dict[str, float] = dataclasses.field(default_factory=dict)
    num_bytes: int = 0
    transfer_seconds: float = 0.0
    iterations_rerun: int = 0
    num_first_steps: int = 0
    _entered_at: float = 0.0

    def __post_init__(self) -> None:
        self._entered_at = self.announced_at

    def enter(self, action: e.EnterPhase, now: float, killed_at: float | None) -> None:
        """killed_at: when the fault was injected, where it was."""
        if action.phase is Phase.REGROUPING:
            self.nodes_lost = list(action.nodes_lost)
            self.respawned = dict(action.respawned)
            used = dict.fromkeys([*self.spares_used, *action.spares_used])
            self.spares_used = [node for node in used if node not in self.nodes_lost]
            self.restored_iteration = action.restore
            self.seconds["detect"] = self.announced_at - (killed_at or self.lost_at)
            self.seconds["abort"] = now - self._entered_at
        elif action.phase is Phase.TRAINING:
            # Members' stages fill the phase; what remains is news travelling.
            inside = sum(self.seconds.get(s, 0.0) for s in ("regroup", "restore", "verify"))
            self.seconds["agree"] = max(0.0, now - self._entered_at - inside)
        self._entered_at = now

    def take_ready(self, ready: m.Ready) -> None:
        for stage, seconds in ready.seconds.items():
            if stage == "transfer":
                self.transfer_seconds = max(self.transfer_seconds, seconds)
            else:
                self.seconds[stage] = max(seconds, self.seconds.get(stage, 0.0))
        self.num_bytes += ready.num_bytes
        self.iterations_rerun = max(self.iterations_rerun, ready.iterations_rerun)

    def take_first_step(self, step: m.FirstStep) -> None:
        self.num_first_steps += 1
        self.seconds["first_step"] = max(step.seconds, self.seconds.get("first_step", 0.0))

    @property
    def total(self) -> float:
        """From the fault to the end of the first step after it."""
        return sum(s for stage, s in self.seconds.items() if stage != "setup")

    @property
    def gigabytes_per_s(self) -> float:
        return self.num_bytes / self.transfer_seconds / 1e9 if self.transfer_seconds else 0.0

    def line(self) -> str:
        stages = " ".join(f"{s} {self.seconds[s]:.3f}" for s in STAGES if s in self.seconds)
        return (
            f"[deadpool] epoch {self.epoch}: {self._words()}; "
            f"back at iteration {self.restored_iteration}, {self.iterations_rerun} run again; "
            f"seconds: {stages} total {self.total:.3f}; "
            f"{self.num_bytes} bytes at {self.gigabytes_per_s:.2f} GB/s"
        )

    def _words(self) -> str:
        nodes = ",".join(map(str, self.nodes_lost))
        spares = ",".join(map(str, self.spares_used))
        words = [f"node {nodes} lost, spare {spares} took its place"] if nodes else []
        words += [f"trainer of node {x} started anew ({y})" for x, y in self.respawned.items()]
        return ", ".join(words or ["repaired in place"])

    @property
    def event(self) -> str:
        if self.nodes_lost:
            return "swap"
        return "respawn" if self.respawned else "repair"

    def record(self) -> dict[str, Any]:
        return {
            "event": self.event,
            "epoch": self.epoch,
            "nodes_lost": self.nodes_lost,
            "spares_used": self.spares_used,
            "respawned": list(self.respawned),
            "restored_iteration": self.restored_iteration,
            "iterations_rerun": self.iterations_rerun,
            "seconds": {**self.seconds, "total": self.total},
            "num_bytes": self.num_bytes,
            "gigabytes_per_s": self.gigabytes_per_s,
        }


class SwapReporter:
    """Follows the swaps that this guardian leads; prints and writes each once it is complete.

    log_dir: where events.jsonl is, or None. injects: faults are caused there on purpose.
    """

    def __init__(self, log_dir: str | None, injects: bool, world_size: int) -> None:
        self._log_dir = log_dir
        self._injects = injects
        self._world_size = world_size
        self._leader_lost_at: float | None = None
        self._report: SwapReport | None = None

    def see(self, event: e.Event) -> None:
        """Before the core takes it: a recovery that this guardian comes to lead began when the
        leader was lost."""
        if isinstance(event, e.LeaderGone) and self._leader_lost_at is None:
            self._leader_lost_at = time.monotonic()
        elif isinstance(event, e.FromLeader) and isinstance(event.message, m.Resume):
            self._leader_lost_at = None  # Another led it.

    def enter(self, action: e.EnterPhase) -> None:
        now = time.monotonic()
        if action.phase is Phase.ABORTING:
            lost_at = self._report.lost_at if self._report else self._leader_lost_at or now
            # Of an epoch that did not get to its first step: its spares have their places.
            used = self._report.spares_used if self._report else []
            self._report = SwapReport(
                epoch=action.epoch, lost_at=lost_at, announced_at=now, spares_used=list(used)
            )
        elif action.phase is Phase.REGROUPING and action.restore is None:
            self._report = None  # The job's first epoch.
        elif self._report is not None:
            self._report.enter(action, now, self._injected_kill(action.nodes_lost))
        if action.phase is Phase.TRAINING:
            self._leader_lost_at = None

    def observe(self, action: e.Observe) -> None:
        message = action.message
        if isinstance(message, m.Faltered) and message.kind == STALLED:
            say(
                f"[deadpool] node {action.node}: {message.reason}; all ranks go back to the last "
                "snapshot"
            )
        report = self._report
        if report is None:
            return
        if isinstance(message, m.Ready):
            report.take_ready(message)
        elif isinstance(message, m.FirstStep) and message.epoch == report.epoch:
            report.take_first_step(message)
            if report.num_first_steps == self._world_size:
                self._report = None
                say(report.line())
                if self._log_dir is not None:
                    path = os.path.join(self._log_dir, "events.jsonl")
                    append_json_line(path, report.record())

    def suspect(self, action: e.SuspectCorruption) -> None:
        say(
            f"[deadpool] node {action.node}: suspected silent corruption: iteration "
            f"{action.iteration} had a non-finite value there, and none when it was run again on "
            f"the same data ({action.reason})",
        )
        if self._log_dir is not None:
            record = {"event": "suspected-corruption", **dataclasses.asdict(action)}
            append_json_line(os.path.join(self._log_dir, "events.jsonl"), record)

    def lack(self, action: e.Lacks) -> None:
        lost = ", ".join(map(str, action.nodes_lost))
        say(
            f"[deadpool] node {lost} was lost and no complete spare node is left; waiting for one: "
            "python -m deadpool join",
        )

    def _injected_kill(self, nodes_lost: Sequence[Node]) -> float | None:
        """When the last injected fault struck, by the clock that all processes of one machine
        share; None for a fault of another origin."""
        if self._log_dir is None or not self._injects:
            return None
        try:
            with open(os.path.join(self._log_dir, "injections.jsonl")) as file:
                last = [record for record in map(json.loads, file) if "phase" in record][-1]
        except (OSError, IndexError):
            return None
        return float(last["monotonic_s"]) if last["node"] in nodes_lost else None
