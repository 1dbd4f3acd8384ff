"""Multi-process tests: ranks are forked from a server that has imported everything already.

Importing torch and megatron-core costs seconds of CPU; a fork costs milliseconds.
"""

from __future__ import annotations

import multiprocessing
import os
import socket
import sys
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import pytest
from rank_process import rank_main

REPOSITORY = Path(__file__).resolve().parents[1]
PRELOADED = ["torch", "megatron.core", "megatron.training.pretrain"]
GOLDEN = REPOSITORY / "tests" / "golden"

RunRanks = Callable[..., list[Any]]


@pytest.fixture(scope="session")
def fork_server() -> Iterator[Any]:
    """A multiprocessing context whose processes are forked from a preloaded server."""
    os.environ["PYTHONPATH"] = os.pathsep.join(
        [str(REPOSITORY), *filter(None, [os.environ.get("PYTHONPATH")])]
    )
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("PYTHONWARNINGS", "ignore")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    yield context


@pytest.fixture
def run_ranks(fork_server: Any, tmp_path: Path) -> RunRanks:
    """`run_ranks(world_size, target, *args, timeout_s=120, env=None)` -> results by rank.

    `target(*args)` runs in `world_size` processes, with torchrun's environment set. Fails the test
    with every rank's output when one raises, dies or does not end in time. `output=True` gives
    (result, text on the terminal) by rank instead.
    """
    calls = iter(range(1_000))

    def run(
        world_size: int,
        target: Callable[..., Any],
        *args: Any,
        timeout_s: float = 120.0,
        env: dict[str, str] | None = None,
        output: bool = False,
    ) -> list[Any]:
        folder = tmp_path / f"ranks-{next(calls)}"
        folder.mkdir()
        return _run(fork_server, folder, world_size, target, args, timeout_s, env or {}, output)

    return run


def _run(
    context: Any,
    folder: Path,
    world_size: int,
    target: Callable[..., Any],
    args: tuple[Any, ...],
    timeout_s: float,
    env: dict[str, str],
    output: bool,
) -> list[Any]:
    shared = {
        "WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(_free_port()),
        "GLOO_SOCKET_IFNAME": "lo",
        "CUDA_DEVICE_MAX_CONNECTIONS": "1",
        **env,
    }
    processes, readers = [], []
    for rank in range(world_size):
        reader, writer = context.Pipe(duplex=False)
        own = {**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)}
        process = context.Process(
            target=rank_main, args=(writer, str(folder / f"{rank}.log"), own, target, args)
        )
        process.start()
        writer.close()
        processes.append(process)
        readers.append(reader)
    try:
        results = _collect(readers, time.monotonic() + timeout_s)
    finally:
        for process in processes:
            process.join(timeout=5 if sys.exc_info()[0] is None else 0)
            if process.is_alive():
                process.kill()
            process.join()
    logs = [(folder / f"{rank}.log").read_text(errors="replace") for rank in range(world_size)]
    failed = [rank for rank in range(world_size) if not results.get(rank, (False, None))[0]]
    if failed:
        shown = "\n".join(
            f"--- rank {rank}: {results.get(rank, (False, 'no result'))[1]}\n{logs[rank][-6000:]}"
            for rank in range(world_size)
        )
        pytest.fail(f"ranks {failed} of {world_size} failed\n{shown}", pytrace=False)
    values = [results[rank][1] for rank in range(world_size)]
    return list(zip(values, logs, strict=True)) if output else values


def _collect(readers: list[Connection], deadline: float) -> dict[int, tuple[bool, Any]]:
    """(succeeded, result) by rank. Stops waiting soon after the first failure."""
    results: dict[int, tuple[bool, Any]] = {}
    pending = {reader: rank for rank, reader in enumerate(readers)}
    while pending:
        ready = wait(list(pending), timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            break
        for reader in ready:
            rank = pending.pop(reader)  # type: ignore[call-overload, arg-type]
            try:
                results[rank] = reader.recv()  # type: ignore[union-attr]
            except EOFError:
                results[rank] = (False, "died without a result")
            if not results[rank][0]:
                deadline = min(deadline, time.monotonic() + 3)
    return results


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])
