"""`python -m deadpool lead`: the leader of a job whose tasks a cluster's launcher starts.

It runs beside `srun` in the batch script. Where it listens, and the job's token, go to a file that
the tasks find by DEADPOOL_JOB_FILE on a shared file system.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
from pathlib import Path

from deadpool.config import ConfigError, DeadpoolConfig, add_job_arguments, checked_job
from deadpool.coordinator import Coordinator
from deadpool.protocol.placement import Grid

_LEAVE_TIMEOUT_S = 60.0


def add_lead_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "lead",
        help="lead a job whose tasks srun starts",
        description="Lead a job whose tasks a cluster's launcher starts with the same script and "
        "arguments, and with DEADPOOL_JOB_FILE in their environment.",
    )
    parser.add_argument(
        "--job-file",
        default=os.environ.get("DEADPOOL_JOB_FILE"),
        help="written for the tasks, on a shared file system (default: $DEADPOOL_JOB_FILE)",
    )
    parser.add_argument(
        "--host", help="address at which the tasks reach this host (default: its own name's)"
    )
    add_job_arguments(parser)
    parser.set_defaults(run=run_lead)


def run_lead(args: argparse.Namespace) -> int:
    """Returns the exit code of the job; 2 for input that does not fit."""
    try:
        config, grid = checked_job(args)
        if not args.job_file:
            raise ConfigError(
                "lead needs to know where to write the job file: give --job-file PATH, or set "
                "DEADPOOL_JOB_FILE for it and for the tasks"
            )
        host = args.host or socket.gethostbyname(socket.gethostname())
    except (ConfigError, OSError) as error:
        print(f"deadpool: {error}", file=sys.stderr)
        return 2
    environ = {**os.environ, "DEADPOOL_ROLE": "check", "WORLD_SIZE": str(grid.world_size)}
    check = subprocess.run([sys.executable, args.script, *args.arguments], env=environ, check=False)
    if check.returncode != 0:
        return check.returncode
    if config.log_dir is not None:
        os.makedirs(config.log_dir, exist_ok=True)
    job_file = Path(args.job_file)
    try:
        return asyncio.run(_lead(config, grid, args.spare_nodes, host, job_file))
    finally:
        job_file.unlink(missing_ok=True)


async def _lead(
    config: DeadpoolConfig, grid: Grid, num_spare_nodes: int, host: str, job_file: Path
) -> int:
    token = secrets.token_hex(16)
    coordinator = Coordinator(
        config=config, grid=grid, num_spare_nodes=num_spare_nodes, token=token, fence=lambda _: None
    )
    address = await coordinator.listen(host)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        words = f"ended by {number.name}"
        loop.add_signal_handler(number, coordinator.end, 128 + number, words)
    _write_job_file(job_file, address, token, grid.world_size)
    exit_code, reason = await coordinator.wait_end()
    if reason:
        print(f"deadpool: {reason}", file=sys.stderr, flush=True)
    await coordinator.wait_disconnected(_LEAVE_TIMEOUT_S)
    await coordinator.close()
    return exit_code


def _write_job_file(path: Path, address: tuple[str, int], token: str, world_size: int) -> None:
    """For the owner's eyes alone, and whole as soon as it is there."""
    record = {"leader": f"{address[0]}:{address[1]}", "token": token, "world_size": world_size}
    temporary = path.with_name(path.name + ".new")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "w") as file:
        json.dump(record, file)
    temporary.replace(path)
