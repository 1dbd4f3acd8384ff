"""pretrain_gpt.py with clocks, for `tools/bench_overhead.py`: the same with --deadpool and without.

DEADPOOL_BENCH, JSON in the environment, is read here alone; DEADPOOL itself knows nothing of it. A
trainer writes slotN.json, a guardian guardianN.json, when they have ended well. What a variant
leaves out is replaced here, from outside: losses stay the same, but a lost node could not be
replaced.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

import pretrain_gpt
from deadpool import run, transfers

_BENCH: dict[str, Any] = json.loads(os.environ.get("DEADPOOL_BENCH", "{}"))


def proportional_bytes() -> int:
    """Memory of this process, what it shares counted in shares (smaps_rollup's Pss)."""
    with open("/proc/self/smaps_rollup") as lines:
        for line in lines:
            if line.startswith("Pss:"):
                return int(line.split()[1]) * 1024
    return 0


def main_thread_delay_s() -> float:
    """How long the main thread has been ready to run and had no core (schedstat)."""
    try:
        with open("/proc/self/schedstat") as file:
            return int(file.read().split()[1]) / 1e9
    except OSError:
        return 0.0  # This kernel does not count it.


def pin(who: str) -> None:
    """This process, and those that it starts, to the cores given for trainers or guardians."""
    cores = _BENCH.get(f"{who}_cores")
    if cores:
        os.sched_setaffinity(0, cores)


def _write(name: str, record: dict[str, Any]) -> None:
    with open(os.path.join(_BENCH["folder"], name), "w") as file:
        json.dump(record, file)


# Trainers


class TrainerClock:
    """Wraps the driver's hooks; adds to a list in memory after every step."""

    def __init__(self, hooks: Any) -> None:
        self._hooks = hooks
        self._rows: list[dict[str, Any]] = []
        self._spent = {"capture": 0.0, "seal": 0.0}
        self._after_step = hooks.after_step
        hooks.after_step = self.after_step
        if hasattr(hooks, "_after_optimizer"):
            hooks._after_optimizer = self._timed("capture", hooks._after_optimizer)
            hooks._seal = self._timed("seal", hooks._seal)

    def _timed(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any) -> None:
            started = time.monotonic()
            function(*args)
            self._spent[name] += time.monotonic() - started

        return timed

    def after_step(self, trainer: Any, losses: dict[str, float]) -> None:
        self._after_step(trainer, losses)
        self._rows.append(
            {
                "end": time.monotonic(),
                "cpu": time.process_time(),
                "delay": main_thread_delay_s(),
                "stall": getattr(self._hooks, "_stall_s", 0.0),
                **self._spent,
                "losses": {name: value.hex() for name, value in losses.items()},
            }
        )
        self._spent.update(capture=0.0, seal=0.0)
        slot, iteration = trainer.args.rank, trainer.state.iteration
        if slot == 0:
            with open(os.path.join(_BENCH["folder"], "progress"), "a") as file:
                file.write(".")
        if iteration == trainer.args.train_iters:
            snapshots = getattr(self._hooks, "_snapshots", None)
            record = {
                "slot": slot,
                "rows": self._rows,
                "memory_bytes": proportional_bytes(),
                "snapshot_bytes": snapshots.payload_bytes if snapshots is not None else 0,
                "num_parameters": sum(p.numel() for c in trainer.model for p in c.parameters()),
            }
            _write(f"slot{slot}.json", record)


def train(argv: Sequence[str], hooks: Any = None) -> int:
    from deadpool import pace, snapshot
    from megatron.training.hooks import NoHooks

    pin("trainer")
    if not _BENCH.get("captures", True):
        for name in ("_copy", "_copy_owned"):
            setattr(snapshot.Snapshotter, name, lambda *args: None)
    block = _BENCH.get("alternates")
    if block:
        pace.Pace.is_due = (  # type: ignore[method-assign]
            lambda self, iteration: (iteration - 1) // block % 2 == 0
        )
    hooks = NoHooks() if hooks is None else hooks
    TrainerClock(hooks)
    return pretrain_gpt.train(argv, hooks)


# Guardians


class GuardianClock:
    """In the place of `put_replica`: times it, or does nothing."""

    def __init__(self) -> None:
        self._put = transfers.put_replica
        self.rows: list[dict[str, Any]] = []
        self.memory_bytes = 0

    async def put_replica(self, channel: Any, **given: Any) -> int:
        started, num_bytes = time.monotonic(), 0
        if _BENCH.get("replicates", True):
            num_bytes = await self._put(channel, **given)
        row = {"iteration": given["iteration"], "bytes": num_bytes, "cpu": time.process_time()}
        self.rows.append({**row, "begin": started, "end": time.monotonic()})
        if given["iteration"] == _BENCH["iterations"] - 1:
            self.memory_bytes = proportional_bytes()
        return num_bytes


def main(argv: Sequence[str]) -> int:
    if "--deadpool" not in argv:
        return train(argv)
    pin("guardian")
    clock = GuardianClock()
    transfers.put_replica = clock.put_replica  # type: ignore[assignment]
    code = run.main(argv, train=train, check=pretrain_gpt.check)
    if code == 0 and clock.rows:
        record = {"rows": clock.rows, "memory_bytes": clock.memory_bytes}
        _write(f"guardian{os.getpid()}.json", record)
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
