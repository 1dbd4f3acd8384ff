"""The process that runs one job of the launcher for a test, and what a job leaves.

A module of its own, imported by name: `conftest` names several files.
"""

from __future__ import annotations

import ctypes
import dataclasses
import json
import os
import signal
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil

from deadpool.conformance import check, load
from deadpool.pace import most_iterations_rerun

REPOSITORY = Path(__file__).resolve().parents[2]
_PR_SET_CHILD_SUBREAPER = 36

TRAINING_FLAGS = """
    --num-layers 4 --hidden-size 32 --num-attention-heads 4 --seq-length 32
    --max-position-embeddings 32 --micro-batch-size 1 --global-batch-size 8
    --lr 1e-3 --min-lr 1e-4 --lr-decay-style cosine --lr-warmup-iters 2 --lr-decay-iters 20
    --weight-decay 0.1 --clip-grad 1.0 --tokenizer-type NullTokenizer --vocab-size 256
    --transformer-impl local --distributed-backend gloo --use-distributed-optimizer
    --log-interval 1 --eval-iters 0 --eval-interval 1000 --seed 1234 --split 100,0,0
    --distributed-timeout-minutes 1 --num-workers 0 --deadpool-trace
""".split()

FAULTY_FLAGS = """
    --pipeline-model-parallel-size 2 --use-tp-pp-dp-mapping --bf16 --train-iters 7
""".split()
"""Of the jobs of the fixture `run_faulty`, if no others are given."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What a finished job left."""

    exit_code: int
    output: str
    left_over: list[str]
    """Processes that outlived the launcher."""
    log_dir: Path

    def records(self, name: str) -> list[dict[str, Any]]:
        path = self.log_dir / name
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    @property
    def losses(self) -> dict[int, dict[str, str]]:
        """Iteration to losses as hexadecimal floats; of an iteration run again, the last."""
        return {record["iteration"]: record["hex"] for record in self.records("losses.jsonl")}

    @property
    def parameters(self) -> dict[int, str]:
        """Slot to the hash of its final parameters."""
        return {r["slot"]: r["parameters_xxh3"] for r in self.records("final.jsonl")}

    @property
    def swaps(self) -> list[dict[str, Any]]:
        return [r for r in self.records("events.jsonl") if r["event"] == "swap"]

    def check_clean(self, exit_code: int = 0, *, snapshot_interval: int = 1) -> None:
        """Ended as it should, left no process, and its guardians' traces agree."""
        assert self.exit_code == exit_code, self.output[-6000:]
        assert self.left_over == [], self.left_over
        violations, _ = check(
            load([self.log_dir]) if self.log_dir.exists() else [],
            most_rerun=most_iterations_rerun(snapshot_interval),
        )
        assert not violations, "\n".join(map(str, violations[:5]))


def reap_job(
    writer: Any, output: str, argv: list[str], timeout_s: float, environ: Mapping[str, str]
) -> None:
    """Run the launcher as a child, as the reaper of whatever it orphans, and count that."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    os.environ.update(environ)
    launcher = os.fork()
    if launcher == 0:
        descriptor = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        code = 1
        try:
            from deadpool.__main__ import main

            code = main(argv)
        except SystemExit as error:
            code = error.code if isinstance(error.code, int) else 1
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    writer.send(launcher)
    status, deadline = None, time.monotonic() + timeout_s
    while status is None and time.monotonic() < deadline:
        pid, value = os.waitpid(launcher, os.WNOHANG)
        status = value if pid else None
        time.sleep(0.01)
    if status is None:
        os.kill(launcher, signal.SIGKILL)
        _, status = os.waitpid(launcher, 0)
        exit_code = -1
    else:
        exit_code = os.waitstatus_to_exitcode(status)
    writer.send((exit_code, _reap_orphans()))
    writer.close()
    os._exit(0)


def _reap_orphans() -> list[str]:
    """Names of processes still alive a moment after the launcher's end; kills them."""
    deadline = time.monotonic() + 2
    while True:
        alive = []
        for child in psutil.Process().children(recursive=True):
            try:
                if child.status() != psutil.STATUS_ZOMBIE:
                    alive.append(child)
            except psutil.NoSuchProcess:
                pass
        if not alive or time.monotonic() > deadline:
            break
        time.sleep(0.02)
    names = [f"{child.pid} {child.name()}" for child in alive]
    for child in alive:
        child.kill()
    return names
