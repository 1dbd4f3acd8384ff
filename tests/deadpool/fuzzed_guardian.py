"""A guardian whose trainer only answers: a real process for tests that want no torch.

`python fuzzed_guardian.py STATE_FILE FLAG...` with a launcher's environment. At SIGUSR1 it replaces
STATE_FILE with what it holds.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from deadpool import messages as m
from deadpool.arena import Arena
from deadpool.config import RankEnvironment, grid_of_rank, parse_config
from deadpool.guardian import GuardianProcess, run_guardian
from deadpool.progress import ProgressBoard
from deadpool.wire import BlockingLink


def answer(sock: socket.socket, arena: Arena, board: ProgressBoard, is_first: bool) -> int:
    """A trainer that is always ready and never trains."""
    link = BlockingLink(sock)
    link.send(m.TrainerUp())
    while True:
        message = link.receive()
        if isinstance(message, m.EnterEpoch):
            link.send(m.TrainerAborted(epoch=message.epoch, store_port=1, live=None))
        elif isinstance(message, m.PlanForSlot):
            epoch = message.plan.epoch
            link.send(m.Ready(epoch=epoch, seconds={}, num_bytes=0, iterations_rerun=0))
        elif isinstance(message, m.TrainerEnd):
            return message.exit_code


def state_of(guardian: GuardianProcess) -> dict[str, Any]:
    core = guardian._core
    assert core is not None
    leader = core.leader
    return {
        "rss_bytes": int(Path("/proc/self/statm").read_text().split()[1]) * 4096,
        "descriptors": len(os.listdir("/proc/self/fd")),
        "tasks": len(asyncio.all_tasks(asyncio.get_running_loop())),
        "connections": len(guardian._peers.connections),
        "address": [core.me.host, core.me.control_port, core.me.data_port],
        "job": {
            "standing": core.standing.value,
            "promised": core.promised,
            "installed": core.installed and [core.installed.id, len(core.installed.members)],
            "accepted": len(core.accepted),
            "slot": core.slot,
            "end": repr(core.end),
            "upstream": core.upstream and core.upstream.member,
            "replicas": sorted(core.shelf.holdings()),
            "phase": leader and leader.phase.value,
            "members": leader and sorted(leader.members),
            "nodes_lost": leader and leader.nodes_lost,
        },
    }


def write_state_at_signal(path: str) -> None:
    run = GuardianProcess.run

    async def run_watched(guardian: GuardianProcess) -> int:
        def write() -> None:
            Path(path + ".new").write_text(json.dumps(state_of(guardian)))
            os.replace(path + ".new", path)

        asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, write)
        return await run(guardian)

    GuardianProcess.run = run_watched  # type: ignore[method-assign]


def main(state_file: str, *flags: str) -> int:
    config, _ = parse_config(flags)
    environment = RankEnvironment.from_environ(config.spare_nodes)
    write_state_at_signal(state_file)
    return run_guardian(config, environment, grid_of_rank(flags, environment), answer)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
