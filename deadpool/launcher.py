"""`python -m deadpool launch`: virtual nodes on this machine.

Each virtual node is a session of its own, so that it can be killed whole. The launcher leads
nothing and never ends the job because a node died: it starts nodes, passes signals on, reads the
job's end from how its nodes end, and leaves no process behind.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import os
import shutil
import signal
import tempfile
from collections.abc import Sequence

from deadpool.config import (
    NODES_HERE,
    ConfigError,
    RankEnvironment,
    add_job_arguments,
    checked_job,
    token_from_environ,
)
from deadpool.forkserver import ForkServer
from deadpool.interfaces import choose_host
from deadpool.process import set_process_name
from deadpool.protocol.types import (
    EXIT_FENCED,
    EXIT_GUARDIAN_FAILED,
    EXIT_MINORITY,
    EXIT_NO_JOB,
    EXIT_SPARES_EXHAUSTED,
)
from deadpool.terminal import say

_HOST = "127.0.0.1"
_LEAVE_AFTER_S = {0: 60.0, EXIT_SPARES_EXHAUSTED: 600.0}
"""For the other nodes, once one has ended so: their trainers, or guardians, may still write."""
_LEAVE_AFTER_FAILURE_S = 10.0
_LEAVE_AFTER_SIGNAL_S = 10.0
_RESTART_PAUSE_S = 0.1
"""A node that ends at once, again and again, must not keep the machine busy."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class NodeEnd:
    """How a node's process ended."""

    node: int
    code: int
    """As a shell shows it."""
    by_signal: bool
    """It, or one of its ranks, was killed."""

    @property
    def is_loss(self) -> bool:
        """It says nothing about the job: killed, crashed, or taken for lost."""
        crashed = self.code > 128 and self.code not in (128 + signal.SIGINT, 128 + signal.SIGTERM)
        return self.by_signal or crashed or self.code in (EXIT_FENCED, EXIT_GUARDIAN_FAILED)

    @property
    def ends_job(self) -> bool:
        """The whole job has ended so. A minority's end is not the majority's."""
        return not self.is_loss and self.code not in (EXIT_NO_JOB, EXIT_MINORITY)


def job_exit_code(
    ends: Sequence[NodeEnd], *, signalled: int | None, drains: bool
) -> tuple[int, str]:
    """The job's exit code and, where no node says why, the reason. Pure.

    ends: of all nodes, in the order in which they came. signalled: the signal that the launcher
    passed on; drains: by which training saves and finishes.
    """
    if any(end.ends_job and end.code == 0 for end in ends) and (signalled is None or drains):
        return 0, ""
    if signalled is not None:
        return 128 + signalled, ""
    said = [end.code for end in ends if end.ends_job]
    said += [end.code for end in ends if not end.is_loss and end.code == EXIT_MINORITY]
    if said:
        return said[0], ""
    nodes = ", ".join(f"node {end.node} with {end.code}" for end in ends[-8:])
    return 1, (
        f"every node is lost ({nodes or 'none had started'}); start the job again, with --load if "
        "it has saved a checkpoint"
    )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class NodeRun:
    """Nodes to start and how to treat them."""

    script: str
    arguments: tuple[str, ...]
    ranks: tuple[RankEnvironment, ...]
    """Of all nodes."""
    restarts_lost_nodes: bool
    drains_on_sigterm: bool
    kills_on_signal: bool
    """A signal ends the nodes without their guardians' knowledge, as a loss."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What became of a NodeRun."""

    check_code: int
    """Other than 0: nothing was started."""
    ends: tuple[NodeEnd, ...]
    signalled: int | None
    drains: bool


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
        config, _ = checked_job(args)
        token = token_from_environ()
        host = choose_host(config.interface or _HOST, None)
    except (ConfigError, ValueError) as error:
        say(f"deadpool: {error}", is_error=True)
        return 2
    if config.log_dir is not None:
        os.makedirs(config.log_dir, exist_ok=True)
    say(
        f"[deadpool] {args.nodes - args.spare_nodes} nodes of {args.ranks_per_node} ranks train, "
        f"{args.spare_nodes} spare; importing torch and megatron-core",
    )
    folder = tempfile.mkdtemp(prefix="deadpool-")  # Mode 0700.
    try:
        ranks = tuple(
            RankEnvironment(
                job_file=os.path.join(folder, "job.json"),
                contacts=(),
                token=token,
                forms_job=node == 0 and local_rank == 0,
                node=node,
                local_rank=local_rank,
                num_nodes=args.nodes,
                ranks_per_node=args.ranks_per_node,
                num_spare_nodes=args.spare_nodes,
                host=host,
            )
            for node in range(args.nodes)
            for local_rank in range(args.ranks_per_node)
        )
        outcome = run_nodes(
            NodeRun(
                script=args.script,
                arguments=tuple(args.arguments),
                ranks=ranks,
                restarts_lost_nodes=args.restart_lost_nodes,
                drains_on_sigterm=config.drains_on_sigterm,
                kills_on_signal=False,
            )
        )
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    if outcome.check_code != 0:
        return outcome.check_code
    exit_code, reason = job_exit_code(
        outcome.ends, signalled=outcome.signalled, drains=outcome.drains
    )
    if reason:
        say(f"deadpool: {reason}", is_error=True)
    return exit_code


def run_nodes(run: NodeRun) -> Outcome:
    """Check the script's input, start the nodes, and follow them to their end. Main thread."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    fork_server = ForkServer(run.script, run.arguments)
    set_process_name("dp-launcher")

    async def follow() -> Outcome:
        return await _Nodes(run, fork_server).run()

    try:
        return asyncio.run(follow())
    finally:
        fork_server.close()


class _Nodes:
    """One NodeRun; lives on one event loop."""

    def __init__(self, run: NodeRun, fork_server: ForkServer) -> None:
        self._run = run
        self._fork_server = fork_server
        self._loop = asyncio.get_running_loop()
        self._checked: asyncio.Future[int] = self._loop.create_future()
        self._all_ended = asyncio.Event()
        self._pids: dict[int, int | None] = {}
        """Nodes that have not ended; None until a node's start is confirmed."""
        self._ends: list[NodeEnd] = []
        self._signalled: int | None = None
        self._is_over = False
        """The job has ended, or is being ended: nothing is started any more."""
        self._is_killing = False

    async def run(self) -> Outcome:
        for number in (signal.SIGINT, signal.SIGTERM):
            self._loop.add_signal_handler(number, self._on_signal, number)
        reader, self._writer = await asyncio.open_connection(sock=self._fork_server.socket)
        follow = self._loop.create_task(self._follow_fork_server(reader))
        self._command({"check": self._check_environ()})
        check_code = await self._checked
        if check_code == 0:
            for node in sorted({rank.node for rank in self._run.ranks}):
                self._start_node(node, self._run.ranks)
            await self._all_ended.wait()
        follow.cancel()
        return Outcome(
            check_code=check_code,
            ends=tuple(self._ends),
            signalled=self._signalled,
            drains=self._drains,
        )

    @property
    def _drains(self) -> bool:
        return self._run.drains_on_sigterm and self._signalled == signal.SIGTERM

    def _check_environ(self) -> dict[str, str]:
        first = self._run.ranks[0]
        return {
            "DEADPOOL_ROLE": "check",
            "WORLD_SIZE": str(first.world_size),
            NODES_HERE: str(len({rank.node for rank in self._run.ranks})),
            **first.to_environ(),
        }

    def _command(self, command: dict[str, object]) -> None:
        self._writer.write((json.dumps(command) + "\n").encode())

    def _start_node(self, node: int, ranks: Sequence[RankEnvironment]) -> None:
        environs = [
            {
                "DEADPOOL_ROLE": "guardian",
                "WORLD_SIZE": str(rank.world_size),
                **rank.to_environ(),
            }
            for rank in ranks
            if rank.node == node
        ]
        self._pids[node] = None
        self._command({"start": node, "environs": environs})

    def _restart_node(self, node: int) -> None:
        if self._is_over:
            self._forget(node)
            return
        joining = [dataclasses.replace(rank, forms_job=False) for rank in self._run.ranks]
        self._start_node(node, joining)

    async def _follow_fork_server(self, reader: asyncio.StreamReader) -> None:
        while line := await reader.readline():
            message = json.loads(line)
            if "checked" in message:
                if not self._checked.done():
                    self._checked.set_result(message["checked"])
            elif "started" in message:
                self._node_started(message["started"], message["pid"])
            elif "ended" in message:
                self._node_ended(
                    NodeEnd(
                        node=message["ended"],
                        code=message["code"],
                        by_signal=message["by_signal"],
                    )
                )
        if not self._checked.done():
            self._checked.set_result(1)
        say("deadpool: the process that starts nodes has ended", is_error=True)
        self._all_ended.set()  # Its nodes have ended with it.

    def _node_started(self, node: int, pid: int) -> None:
        self._pids[node] = pid
        if self._is_killing:
            self._kill(node)
        elif self._signalled is not None:
            self._pass_on(node)

    def _node_ended(self, end: NodeEnd) -> None:
        if end.ends_job and not any(earlier.ends_job for earlier in self._ends):
            self._is_over = True
            leave_s = _LEAVE_AFTER_S.get(end.code, _LEAVE_AFTER_FAILURE_S)
            self._loop.call_later(leave_s, self._kill_all)
        self._ends.append(end)
        has_others = len(self._pids) > 1
        if self._run.restarts_lost_nodes and end.is_loss and has_others and not self._is_over:
            self._pids[end.node] = None
            self._loop.call_later(_RESTART_PAUSE_S, self._restart_node, end.node)
        else:
            self._forget(end.node)

    def _forget(self, node: int) -> None:
        self._pids.pop(node, None)
        if not self._pids:
            self._all_ended.set()

    def _on_signal(self, number: int) -> None:
        if not self._checked.done():
            self._checked.set_result(128 + number)
        elif self._signalled is not None or self._is_over or self._run.kills_on_signal:
            self._signalled = self._signalled or (None if self._is_over else number)
            self._is_over = True
            self._kill_all()
        else:
            self._signalled = number
            self._is_over = True
            for node in self._pids:
                self._pass_on(node)
            if not self._drains:
                self._loop.call_later(_LEAVE_AFTER_SIGNAL_S, self._kill_all)

    def _pass_on(self, node: int) -> None:
        """The signal, to the node's process, which passes it to its guardians."""
        pid = self._pids[node]
        if pid is not None and self._signalled is not None:
            try:
                os.kill(pid, self._signalled)
            except ProcessLookupError:
                pass  # It has ended; the news is on its way.

    def _kill_all(self) -> None:
        self._is_killing = True
        for node in self._pids:
            self._kill(node)

    def _kill(self, node: int) -> None:
        """Every process of the node."""
        pid = self._pids[node]
        if pid is not None:
            try:
                os.killpg(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass  # All of it has ended already.
