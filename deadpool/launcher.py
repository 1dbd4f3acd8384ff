"""`python -m deadpool launch`: virtual nodes on this machine, and the leader of their job.

Each virtual node is a session of its own, so that it can be killed whole. The launcher never ends
the job because a node died; it ends with the training's exit code and leaves no process behind.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import secrets
import signal
import sys

from deadpool.config import (
    ConfigError,
    DeadpoolConfig,
    RankEnvironment,
    add_job_arguments,
    checked_job,
)
from deadpool.coordinator import Coordinator
from deadpool.forkserver import ForkServer
from deadpool.process import set_process_name
from deadpool.protocol.placement import Grid
from deadpool.protocol.types import Node

logger = logging.getLogger(__name__)

_HOST = "127.0.0.1"


def add_launch_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "launch",
        help="start a job of virtual nodes on this machine",
        description="Start virtual nodes on this machine and train on them. The script and its "
        "arguments come last.",
    )
    parser.add_argument(
        "--restart-lost-nodes",
        action="store_true",
        help="start a lost node anew; it comes back as a spare",
    )
    add_job_arguments(parser)
    parser.set_defaults(run=run_launch)


def run_launch(args: argparse.Namespace) -> int:
    """Returns the exit code of the job; 2 for input that does not fit."""
    try:
        config, grid = checked_job(args)
    except ConfigError as error:
        print(f"deadpool: {error}", file=sys.stderr)
        return 2
    if config.log_dir is not None:
        os.makedirs(config.log_dir, exist_ok=True)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    num_active = args.nodes - args.spare_nodes
    print(
        f"[deadpool] {num_active} nodes of {args.ranks_per_node} ranks train, {args.spare_nodes} "
        "spare; importing torch and megatron-core",
        flush=True,
    )
    fork_server = ForkServer(args.script, args.arguments)
    set_process_name("dp-launcher")
    try:
        return asyncio.run(_run(args, config, grid, fork_server))
    finally:
        fork_server.close()


async def _run(
    args: argparse.Namespace, config: DeadpoolConfig, grid: Grid, fork_server: ForkServer
) -> int:
    return await _Launch(args, config, grid, fork_server).run()


class _Launch:
    """One job; lives on one event loop."""

    def __init__(
        self, args: argparse.Namespace, config: DeadpoolConfig, grid: Grid, fork_server: ForkServer
    ) -> None:
        self._args = args
        self._config = config
        self._grid = grid
        self._fork_server = fork_server
        self._token = secrets.token_hex(16)
        self._pids: dict[int, int] = {}
        self._all_ended = asyncio.Event()
        self._checked: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._coordinator: Coordinator | None = None
        self._address: tuple[str, int] = (_HOST, 0)

    async def run(self) -> int:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._on_signal, number)
        reader, writer = await asyncio.open_connection(sock=self._fork_server.socket)
        follow = loop.create_task(self._follow_fork_server(reader))
        self._fork_server_writer = writer
        self._command({"check": {"DEADPOOL_ROLE": "check", **self._common_environ()}})
        code = await self._checked
        if code != 0:
            follow.cancel()
            return code
        self._coordinator = Coordinator(
            config=self._config,
            grid=self._grid,
            num_spare_nodes=self._args.spare_nodes,
            token=self._token,
            fence=self._fence,
        )
        self._address = await self._coordinator.listen(_HOST)
        for node in range(self._args.nodes):
            self._start_node(node)
        exit_code, reason = await self._coordinator.wait_end()
        if reason:
            print(f"deadpool: {reason}", file=sys.stderr, flush=True)
        await self._wait_nodes(60.0 if exit_code == 0 else 5.0)
        await self._coordinator.close()
        follow.cancel()
        return exit_code

    async def _wait_nodes(self, timeout_s: float) -> None:
        if self._pids:
            self._all_ended.clear()
            try:
                await asyncio.wait_for(self._all_ended.wait(), timeout_s)
            except asyncio.TimeoutError:
                for node in list(self._pids):
                    self._fence(Node(node))

    def _command(self, command: dict[str, object]) -> None:
        self._fork_server_writer.write((json.dumps(command) + "\n").encode())

    def _common_environ(self) -> dict[str, str]:
        return {"WORLD_SIZE": str(self._grid.world_size)}

    def _start_node(self, node: int) -> None:
        environs = [
            {
                "DEADPOOL_ROLE": "guardian",
                **self._common_environ(),
                **RankEnvironment(
                    leader=self._address,
                    token=self._token,
                    node=node,
                    local_rank=local_rank,
                    world_size=self._grid.world_size,
                    host=_HOST,
                ).to_environ(),
            }
            for local_rank in range(self._args.ranks_per_node)
        ]
        self._command({"start": node, "environs": environs})

    async def _follow_fork_server(self, reader: asyncio.StreamReader) -> None:
        while line := await reader.readline():
            message = json.loads(line)
            if "checked" in message:
                self._checked.set_result(message["checked"])
            elif "started" in message:
                self._pids[message["started"]] = message["pid"]
            elif "ended" in message:
                self._node_ended(message["ended"])
        if not self._checked.done():
            self._checked.set_result(1)
        if self._coordinator is not None:
            self._coordinator.end(1, "the fork server ended")

    def _node_ended(self, node: int) -> None:
        self._pids.pop(node, None)
        assert self._coordinator is not None
        if self._coordinator.is_over:
            if not self._pids:
                self._all_ended.set()
        elif self._args.restart_lost_nodes:
            self._start_node(node)
        elif not self._pids:
            self._coordinator.end(1, "every node has ended")

    def _fence(self, node: Node) -> None:
        """Kill what is left of a node. Its pid is still ours: the fork server reaps it later."""
        pid = self._pids.get(node)
        if pid is not None:
            try:
                os.killpg(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass  # All of it has ended already.

    def _on_signal(self, number: int) -> None:
        if self._coordinator is None:
            if not self._checked.done():
                self._checked.set_result(128 + number)
        elif number == signal.SIGTERM and "--exit-signal-handler" in self._args.arguments:
            self._coordinator.drain()
        else:
            self._coordinator.end(128 + number, f"ended by {signal.Signals(number).name}")
