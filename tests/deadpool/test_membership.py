"""No process is special: leaders that die, stop or come back, late spares, minorities."""

from __future__ import annotations

import ctypes
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.deadpool.job_process import REPOSITORY, TRAINING_FLAGS
from tests.deadpool.test_job import (
    PIPELINE,
    launch,
    node_processes,
    wait_for_iteration,
)

PIDFD_GETFD = 438
GATED = "tests/deadpool/gated_pretrain.py"
IMPATIENT = (
    "--deadpool-heartbeat-interval 0.2 --deadpool-heartbeat-timeout 2 --deadpool-error-grace 8 "
    "--deadpool-minority-timeout 8"
).split()
TOKEN = {"DEADPOOL_TOKEN": "0123456789abcdef" * 4}
FLAGS = [*PIPELINE, "--train-iters", "7"]


def hold(log_dir: Path, iteration: int) -> Path:
    """The gate before an iteration, shut. Unlink it to open."""
    log_dir.mkdir(exist_ok=True)
    gate = log_dir / f"hold{iteration}"
    gate.touch()
    return gate


def wait_for_swap(log_dir: Path, count: int = 1, timeout_s: float = 60.0) -> None:
    wait_until(
        lambda: (
            (log_dir / "events.jsonl").exists()
            and len((log_dir / "events.jsonl").read_text().splitlines()) >= count
        ),
        f"swap {count} did not come",
        timeout_s,
    )


def wait_until(condition, words: str, timeout_s: float = 60.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, words
        time.sleep(0.02)


def wait_for_repair(log_dir: Path) -> None:
    def is_repaired() -> bool:
        path = log_dir / "events.jsonl"
        return path.exists() and '"repair"' in path.read_text()

    wait_until(is_repaired, "the groups were not rebuilt")


def shut_down_connection(process: psutil.Process, port: int) -> None:
    """End the process's connection to a port, as a network would, without its knowledge."""
    found = [c for c in process.net_connections() if c.raddr and c.raddr.port == port]
    assert len(found) == 1, found
    pidfd = os.pidfd_open(process.pid)
    descriptor = ctypes.CDLL(None, use_errno=True).syscall(PIDFD_GETFD, pidfd, found[0].fd, 0)
    assert descriptor >= 0, os.strerror(ctypes.get_errno())
    with socket.socket(fileno=descriptor) as sock:
        sock.shutdown(socket.SHUT_RDWR)
    os.close(pidfd)


def guardians_of(node: psutil.Process) -> list[psutil.Process]:
    found = [p for p in node.children() if p.name() == "dp-guardian"]
    return sorted(found, key=lambda p: p.pid)


@pytest.mark.parametrize("victim", [0, 1], ids=["leader", "follower"])
def test_stopped_node_is_replaced_and_fenced_when_it_continues(run_job, peace, victim):
    unfailed = peace(launch(3, 1), FLAGS)

    def stop_and_continue(pid, log_dir):
        before, after = hold(log_dir, 4), hold(log_dir, 6)
        wait_for_iteration(log_dir, 3)
        node = node_processes(pid)[victim]
        os.killpg(node.pid, signal.SIGSTOP)
        before.unlink()
        wait_for_swap(log_dir)
        os.killpg(node.pid, signal.SIGCONT)
        wait_until(lambda: not node.is_running(), "it runs on")
        after.unlink()

    job = run_job(launch(3, 1), [*FLAGS, *IMPATIENT], during=stop_and_continue, script=GATED)
    job.check_clean()
    assert [(s["nodes_lost"], s["spares_used"]) for s in job.swaps] == [([victim], [2])]
    assert f"node {victim}" in job.output and "counts as lost" in job.output
    assert job.losses == unfailed.losses
    assert job.parameters == unfailed.parameters


def test_connection_cut_between_live_guardians_costs_no_node(run_job, peace):
    """Each follower loses its connection to the leader once; groups are rebuilt in place."""
    unfailed = peace(launch(3, 1), FLAGS)

    def cut(pid, log_dir):
        before, after = hold(log_dir, 4), hold(log_dir, 6)
        wait_for_iteration(log_dir, 3)
        address = address_of_leader(log_dir)
        leaders_port = int(address.rsplit(":")[1])
        for count, node in enumerate(node_processes(pid)[1:], 1):
            for guardian in guardians_of(node):
                shut_down_connection(guardian, leaders_port)
            before.unlink(missing_ok=True)
            if count == 1:  # The second node has no slots: nobody stands still for it.
                wait_for_repair(log_dir)
        after.unlink()

    job = run_job(launch(3, 1), FLAGS, during=cut, script=GATED)
    job.check_clean()
    assert job.swaps == []
    assert job.losses == unfailed.losses
    assert job.parameters == unfailed.parameters


@pytest.mark.parametrize("victim", [0, 1], ids=["leader", "follower"])
def test_guardian_killed_alone_costs_its_node(run_job, peace, victim):
    unfailed = peace(launch(3, 1), FLAGS)

    def kill_guardian(pid, log_dir):
        wait_for_iteration(log_dir, 2)
        guardians_of(node_processes(pid)[victim])[0].kill()

    job = run_job(launch(3, 1), FLAGS, during=kill_guardian)
    job.check_clean()
    assert [(s["nodes_lost"], s["spares_used"]) for s in job.swaps] == [([victim], [2])]
    # The other guardian of the node is told, and does not wait for a majority.
    (trace,) = job.log_dir.glob(f"protocol-{victim}-1-*.jsonl")
    assert '"exit_code":72' in trace.read_text().splitlines()[-1]
    assert job.losses == unfailed.losses
    assert job.parameters == unfailed.parameters


def test_leader_and_its_successor_killed_at_once_continue_bit_identical(run_job, peace):
    alone = launch(6, 2, ranks=1)
    unfailed = peace(alone, FLAGS)

    def kill_both(pid, log_dir):
        wait_for_iteration(log_dir, 3)
        for node in node_processes(pid)[:2]:
            os.killpg(node.pid, signal.SIGKILL)

    job = run_job(alone, FLAGS, during=kill_both)
    job.check_clean()
    assert job.swaps[-1]["spares_used"], job.swaps
    assert job.losses == unfailed.losses
    assert job.parameters == unfailed.parameters


def test_half_without_its_leader_ends_by_its_bound(run_job):
    """Two nodes of four go at once, the leader among them: the rest could be the smaller half."""

    def kill_two(pid, log_dir):
        wait_for_iteration(log_dir, 2)
        for node in node_processes(pid)[:2]:
            os.killpg(node.pid, signal.SIGKILL)

    job = run_job(launch(4, 2), [*FLAGS, *IMPATIENT], during=kill_two)
    job.check_clean(exit_code=6)
    assert "could not reach a majority" in job.output
    assert max(job.losses) < 7


def test_node_that_joins_late_is_a_spare_like_any_other(run_job, peace, data_cache):
    """The job has used its only spare; the one that came by `join` takes the next place."""
    unfailed = peace(launch(3, 1), FLAGS)
    joiners: list[subprocess.Popen[str]] = []

    def join_and_kill(pid, log_dir):
        gates = [hold(log_dir, 3), hold(log_dir, 5)]
        wait_for_iteration(log_dir, 2)
        joiners.append(start_joiner(pid, log_dir, data_cache))
        nodes = node_processes(pid)
        os.killpg(nodes[1].pid, signal.SIGKILL)
        gates[0].unlink()
        wait_for_swap(log_dir)
        wait_until(lambda: knows_roster(log_dir, node=7), "the joined node is in no roster")
        os.killpg(nodes[0].pid, signal.SIGKILL)
        gates[1].unlink()

    try:
        job = run_job(launch(3, 1), FLAGS, during=join_and_kill, script=GATED, environ=TOKEN)
        output, _ = joiners[0].communicate(timeout=60)
    finally:
        for joiner in joiners:
            joiner.kill()
            joiner.wait()
    job.check_clean()
    assert joiners[0].returncode == 0, output
    assert [(s["nodes_lost"], s["spares_used"]) for s in job.swaps] == [([1], [2]), ([0], [7])]
    assert job.losses == unfailed.losses
    assert job.parameters == unfailed.parameters


def start_joiner(launcher_pid: int, log_dir: Path, data_cache: Path) -> subprocess.Popen[str]:
    """`python -m deadpool join` as another terminal would type it, with the job's address."""
    address = address_of_leader(log_dir)
    data = REPOSITORY / "tests" / "golden" / "licenses_bytes"
    return subprocess.Popen(
        [
            *(sys.executable, "-m", "deadpool", "join", address, "--node", "7"),
            *("--nodes", "3", "--ranks-per-node", "2", "--spare-nodes", "1"),
            *("pretrain_gpt.py", "--deadpool", "--deadpool-log-dir", str(log_dir)),
            *("--deadpool-trace", *TRAINING_FLAGS, *FLAGS),
            *("--data-path", str(data), "--data-cache-path", str(data_cache)),
        ],
        cwd=REPOSITORY,
        env={**os.environ, **TOKEN},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def address_of_leader(log_dir: Path) -> str:
    """Of the launch, as it was told to whoever started it."""
    found = re.search(r"leads .* at (\S+)", (log_dir.parent / "output").read_text())
    assert found is not None
    return found[1]


def knows_roster(log_dir: Path, node: int) -> bool:
    """Both guardians of the node were told a roster in force."""
    traces = list(log_dir.glob(f"protocol-{node}-*.jsonl"))
    return len(traces) == 2 and all(re.search('"(Install|Resume)"', t.read_text()) for t in traces)
