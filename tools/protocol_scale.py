"""What the membership protocol costs as nodes are added: `python tools/protocol_scale.py`.

The cores of a whole job run in this process without a network (`deadpool.simulation.scale`);
messages are counted as they would be encoded, CPU time is that inside the cores. What a message
costs the real connection code is measured on loopback with `deadpool.peers`, and added. Exit code 1
when a recovery or a join grows faster than n log n, or the leader needs more than a core.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import gc
import json
import math
import os
import platform
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from deadpool.peers import Peers
from deadpool.protocol.events import Event, FromFollower
from deadpool.protocol.messages import Heartbeat
from deadpool.protocol.placement import Grid
from deadpool.protocol.types import Iteration, Member, MemberId, Node
from deadpool.simulation.scale import Cluster, Cost

SCENARIOS = {
    "form": "all nodes come, one epoch begins",
    "iteration": "every slot stages, the leader commits",
    "heartbeats": "one interval of every guardian",
    "slot lost": "recovery from the loss of a node with slots",
    "join": "a spare node comes while training",
    "leader lost": "recovery from the loss of the leader's node",
}
RECOVERIES = ("slot lost", "leader lost")
BOUNDED = (*RECOVERIES, "join")
MEASURES = ("num_messages", "num_bytes", "leader_s")
HEARTBEAT_INTERVAL_S = 1.0
ITERATION_S = 5.0
SMALLEST_TIMED = 128
"""Nodes; below, times are of single messages and say nothing about growth."""

TOLERANCE = 0.1
"""Of an exponent of CPU times; counts are exact."""


# Cores


def measure(num_nodes: int, ranks_per_node: int) -> dict[str, Cost]:
    """Every scenario, one after the other in one job. num_nodes: with slots; two more are spare."""
    grid = Grid(
        world_size=num_nodes * ranks_per_node,
        ranks_per_node=ranks_per_node,
        tensor=1,
        context=1,
        pipeline=1,
        pipeline_before_data=False,
    )
    gc.collect()
    gc.disable()  # Or a pause of this many-core process counts as some core's work.
    try:
        cluster, costs = Cluster(grid, num_spare_nodes=2), {}
        cluster.form()
        costs["form"] = cluster.take_cost()
        cluster.train(Iteration(1))
        costs["iteration"] = cluster.take_cost()
        cluster.tick()
        costs["heartbeats"] = cluster.take_cost()
        cluster.lose(Node(num_nodes // 2))
        costs["slot lost"] = cluster.take_cost()
        cluster.train(Iteration(2))
        cluster.take_cost()
        cluster.join()
        costs["join"] = cluster.take_cost()
        cluster.lose(cluster.leader.me.node)
        costs["leader lost"] = cluster.take_cost()
        return costs
    finally:
        gc.enable()


def exponent(sizes: Sequence[float], values: Sequence[float]) -> float:
    """Of the power law that fits best: least squares of the logarithms."""
    xs, ys = [math.log(n) for n in sizes], [math.log(max(v, 1e-9)) for v in values]
    x0, y0 = sum(xs) / len(xs), sum(ys) / len(ys)
    spread = sum((x - x0) ** 2 for x in xs)
    return sum((x - x0) * (y - y0) for x, y in zip(xs, ys, strict=True)) / spread


def fits(costs: dict[int, dict[str, Cost]]) -> list[dict[str, Any]]:
    """Exponent by scenario and measure, beside that of n log n at the same sizes."""
    found = []
    for scenario in SCENARIOS:
        for name in MEASURES:
            sizes = [n for n in costs if name != "leader_s" or n >= SMALLEST_TIMED]
            if len(sizes) < 2:
                continue
            slope = exponent(sizes, [getattr(costs[n][scenario], name) for n in sizes])
            limit = exponent(sizes, [n * math.log2(n) for n in sizes])
            slack = TOLERANCE if name == "leader_s" else 0.0
            fit = {"scenario": scenario, "measure": name, "exponent": slope, "n_log_n": limit}
            found.append({**fit, "is_within": slope <= limit + slack})
    return found


# Connections


def measure_connections(num_connections: int = 256, num_rounds: int = 40) -> tuple[float, float]:
    """CPU seconds that taking and sending a heartbeat cost a leader's process, over loopback: one
    message a connection and round, as in a job, so that nothing is saved by batches."""
    (port_in, port_out), (go_in, go_out) = os.pipe(), os.pipe()
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            port = int(os.read(port_in, 16))
            asyncio.run(_follow(port, go_in, num_connections, num_rounds))
            code = 0
        finally:
            os._exit(code)
    try:
        return asyncio.run(_lead(port_out, go_out, num_connections, num_rounds))
    finally:
        os.close(go_out)
        os.waitpid(pid, 0)
        for descriptor in (port_in, port_out, go_in):
            os.close(descriptor)


_TOKEN = b"x" * 32


def _member(member: int, port: int) -> Member:
    return Member(
        member=MemberId(member),
        node=Node(member),
        local_rank=0,
        host="127.0.0.1",
        control_port=port,
        data_port=1,
    )


async def _lead(port_out: int, go_out: int, num: int, rounds: int) -> tuple[float, float]:
    taken = 0

    def deliver(event: Event) -> None:
        nonlocal taken
        taken += isinstance(event, FromFollower)

    async def wait_for(count: int) -> None:
        deadline = time.monotonic() + 60
        while taken < count:
            assert time.monotonic() < deadline, f"{taken} of {count} messages came"
            await asyncio.sleep(0.005)

    peers = Peers(token=_TOKEN, deliver=deliver)
    port = await peers.listen("127.0.0.1")
    peers.introduce(_member(0, port))
    os.write(port_out, b"%d" % port)
    await wait_for(num)
    begin = time.process_time()
    os.write(go_out, b"g")
    await wait_for(num * (1 + rounds))
    take_s = (time.process_time() - begin) / (num * rounds)
    everybody = tuple(MemberId(x + 1) for x in range(num))
    begin = time.process_time()
    for _ in range(rounds):
        peers.to_followers(everybody, Heartbeat())
        await asyncio.sleep(0.005)
    send_s = (time.process_time() - begin) / (num * rounds)
    os.write(go_out, b"e")
    await asyncio.sleep(0.1)
    await peers.close()
    return take_s, send_s


async def _follow(port: int, go_in: int, num: int, rounds: int) -> None:
    loop, leader = asyncio.get_running_loop(), _member(0, port)
    followers = []
    for x in range(num):
        peers = Peers(token=_TOKEN, deliver=lambda event: None)
        peers.introduce(_member(x + 1, 1))
        peers.to_leader(leader, Heartbeat())
        followers.append(peers)
    await loop.run_in_executor(None, os.read, go_in, 1)
    for _ in range(rounds):
        for peers in followers:
            peers.to_leader(leader, Heartbeat())
        await asyncio.sleep(0.01)
    await loop.run_in_executor(None, os.read, go_in, 1)


def steady_state(num_members: int, costs: dict[str, Cost], per_message: tuple[float, float]) -> Any:
    """The leader's load between losses, in cores, and what it is made of."""
    beats = ITERATION_S / HEARTBEAT_INTERVAL_S
    core_s = beats * costs["heartbeats"].leader_s + costs["iteration"].leader_s
    half = (beats * costs["heartbeats"].num_messages + costs["iteration"].num_messages) / 2
    take_s, send_s = (half * cost for cost in per_message)
    return {
        "members": num_members,
        "messages_per_s": 2 * half / ITERATION_S,
        "core": core_s / ITERATION_S,
        "taking": take_s / ITERATION_S,
        "sending": send_s / ITERATION_S,
        "load": (core_s + take_s + send_s) / ITERATION_S,
    }


# Output


def show(result: dict[str, Any]) -> None:
    for ranks, table in result["costs"].items():
        print(f"\n{ranks} rank(s) a node")
        print(f"{'nodes':>6}  {'what':<12} {'messages':>9} {'bytes':>13} {'largest':>16} ", end="")
        print(f"{'proposal':>9} {'leader s':>9} {'follower s':>10}")
        for nodes, costs in table.items():
            for scenario, cost in costs.items():
                largest = f"{cost['largest']} {cost['largest_type'][:9]}"
                print(
                    f"{nodes:>6}  {scenario:<12} {cost['num_messages']:>9} "
                    f"{cost['num_bytes']:>13} {largest:>16} {cost['proposal_bytes']:>9} "
                    f"{cost['leader_s']:>9.4f} {cost['follower_s']:>10.5f}"
                )
        print(f"\n{'growth with n':<14} " + " ".join(f"{name:>13}" for name in MEASURES))
        for scenario in SCENARIOS:
            row = [f for f in result["fits"][ranks] if f["scenario"] == scenario]
            shown = " ".join(f"{'n^' + format(f['exponent'], '.2f'):>13}" for f in row)
            print(f"{scenario:<14} {shown}")
        limits = {f["measure"]: f["n_log_n"] for f in result["fits"][ranks]}
        shown = " ".join(f"{'n^' + format(x, '.2f'):>13}" for x in limits.values())
        print(f"{'(n log n is)':<14} {shown}")
    take_s, send_s = result["connection_s"]
    print(f"\na heartbeat over loopback: {take_s * 1e6:.1f} us to take, {send_s * 1e6:.1f} to send")
    print(
        f"a leader between losses, heartbeats every {HEARTBEAT_INTERVAL_S:g} s, iterations of "
        f"{ITERATION_S:g} s, in cores:"
    )
    for row in result["steady_state"]:
        print(
            f"{row['members']:>6} members: {row['load']:.4f} = {row['core']:.4f} core + "
            f"{row['taking']:.4f} taking + {row['sending']:.4f} sending "
            f"({row['messages_per_s']:.0f} messages/s)"
        )


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="What the membership protocol costs at scale.")
    parser.add_argument(
        "--nodes", type=int, nargs="+", default=[16, 128, 1024, 8192], help="with slots"
    )
    parser.add_argument("--ranks-per-node", type=int, nargs="+", default=[1, 4])
    parser.add_argument(
        "--most-members", type=int, default=9000, help="larger jobs are left out (default: 9000)"
    )
    parser.add_argument("--json", metavar="FILE", help="write everything there")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    args = build_parser().parse_args(argv)
    per_message = measure_connections()
    result: dict[str, Any] = {
        "machine": f"{os.cpu_count()} cores {platform.machine()}, Python "
        f"{platform.python_version()}, load {os.getloadavg()[0]:.1f}",
        "connection_s": per_message,
        "costs": {},
        "fits": {},
        "steady_state": [],
    }
    print(result["machine"])
    for ranks in args.ranks_per_node:
        costs = {}
        for nodes in sorted(args.nodes):
            if nodes * ranks > args.most_members:
                continue
            costs[nodes] = measure(nodes, ranks)
            members = (nodes + 2) * ranks
            result["steady_state"].append(steady_state(members, costs[nodes], per_message))
        result["costs"][ranks] = {
            n: {scenario: dataclasses.asdict(cost) for scenario, cost in row.items()}
            for n, row in costs.items()
        }
        result["fits"][ranks] = fits(costs)
    show(result)
    if args.json:
        Path(args.json).write_text(json.dumps(result, indent=1) + "\n")
    broken = [
        f"{fit['scenario']}, {ranks} rank(s) a node: {fit['measure']} grows as "
        f"n^{fit['exponent']:.2f}, n log n as n^{fit['n_log_n']:.2f}"
        for ranks, rows in result["fits"].items()
        for fit in rows
        if fit["scenario"] in BOUNDED and not fit["is_within"]
    ]
    broken += [
        f"a leader of {row['members']} members needs {row['load']:.2f} cores"
        for row in result["steady_state"]
        if row["load"] >= 1.0
    ]
    for line in broken:
        print(f"broken: {line}")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
