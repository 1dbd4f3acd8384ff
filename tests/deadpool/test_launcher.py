"""The launcher with nodes that do what a test wants: exit codes, restarts, signals, what is left.

No torch: nothing is preloaded, and the script is a few lines.
"""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from deadpool.launcher import NodeEnd, job_exit_code
from tests.deadpool.job_process import REPOSITORY

# The decision

KILLED = (137, True)
FENCED, NO_JOB, MINORITY = 72, 70, 6


def ends(*codes: int | tuple[int, bool]) -> list[NodeEnd]:
    pairs = [code if isinstance(code, tuple) else (code, False) for code in codes]
    return [NodeEnd(node=n, code=c, by_signal=s) for n, (c, s) in enumerate(pairs)]


TERM, INT = signal.SIGTERM, signal.SIGINT


@pytest.mark.parametrize(
    ("codes", "signalled", "drains", "expected"),
    [
        ([0, 0, 0], None, False, 0),
        ([KILLED, FENCED, 0], None, False, 0),
        ([3, 0], None, False, 0),
        ([3, 3, KILLED], None, False, 3),
        ([KILLED, FENCED, NO_JOB, 4, 5], None, False, 4),
        ([MINORITY, 3], None, False, 3),
        ([MINORITY, KILLED], None, False, MINORITY),
        ([(1, False), KILLED], None, False, 1),
        ([(139, True), (134, False), 72], None, False, 1),
        ([KILLED, KILLED, FENCED], None, False, 1),
        ([NO_JOB, NO_JOB], None, False, 1),
        ([143, 143], None, False, 143),
        ([], None, False, 1),
        ([143, 143], TERM, False, 143),
        ([KILLED, KILLED], TERM, False, 143),
        ([0, 0], INT, False, 130),
        ([0, KILLED], TERM, True, 0),
        ([1, 1], TERM, True, 143),
    ],
)
def test_exit_code_of_the_job(codes, signalled, drains, expected):
    code, reason = job_exit_code(ends(*codes), signalled=signalled, drains=drains)
    assert code == expected
    lost = not any(end.ends_job or end.code == MINORITY for end in ends(*codes))
    assert bool(reason) == (lost and signalled is None)
    assert not reason or "every node is lost" in reason


@pytest.mark.parametrize(
    ("code", "is_loss", "ends_job"),
    [
        (0, False, True), (1, False, True), (2, False, True), (3, False, True), (4, False, True),
        (5, False, True), (130, False, True), (143, False, True),
        (KILLED, True, False), ((143, True), True, False), (139, True, False), (137, True, False),
        (FENCED, True, False), (NO_JOB, False, False), (MINORITY, False, False),
    ],
)  # fmt: skip
def test_what_the_end_of_a_node_says(code, is_loss, ends_job):
    (end,) = ends(code)
    assert (end.is_loss, end.ends_job) == (is_loss, ends_job)


# The processes

SCRIPT = """
import json, os, signal, subprocess, sys, time
if os.environ["DEADPOOL_ROLE"] == "check":
    code = int(os.environ.get("CHECK_CODE", "0"))
    if code == 99:
        print("checking", flush=True)
        time.sleep(60)
    sys.exit(code)
node, rank = int(os.environ["DEADPOOL_NODE"]), int(os.environ["DEADPOOL_LOCAL_RANK"])
joins = bool(os.environ["DEADPOOL_JOINS"])
words = json.loads(os.environ["NODES"])[node]
word = words[1] if node in (0, 1) and joins and os.path.exists(f"seen-{node}-{rank}") else words[0]
open(f"seen-{node}-{rank}", "a").write(f"{int(joins)}\\n")
folder = os.path.dirname(os.environ["DEADPOOL_JOB_FILE"])
assert os.stat(folder).st_mode & 0o777 == 0o700
open(os.environ["DEADPOOL_JOB_FILE"], "a").close()
trainer = None
def on_signal(number, frame):
    print(f"node {node} rank {rank} got {number}", flush=True)
    if word == "deaf":
        return
    alive = trainer is not None and trainer.poll() is None
    print(f"trainer {'alive' if alive else 'dead'}", flush=True)
    os._exit(0 if word == "drain" else 128 + number)
if word == "default":
    time.sleep(60)
for number in (signal.SIGTERM, signal.SIGINT):
    signal.signal(number, on_signal)
if word.startswith("exit"):
    sys.exit(int(word[4:]))
if word == "last":
    seen = [f"seen-1-{r}" for r in range(2)]
    while not all(os.path.exists(s) and open(s).read() == "1\\n1\\n" for s in seen):
        time.sleep(0.01)
    sys.exit(0)
if word == "kill":
    os.kill(os.getpid(), signal.SIGKILL)
trainer = subprocess.Popen(["sleep", "60"])
print(f"node {node} rank {rank} waits", flush=True)
while True:
    time.sleep(0.01)
"""

MAIN = """
import sys
from deadpool import forkserver, launcher
forkserver.PRELOAD = ()
launcher._LEAVE_AFTER_FAILURE_S = {leave}
launcher._LEAVE_AFTER_S.clear()
launcher._LEAVE_AFTER_SIGNAL_S = {signal_leave}
{more}
from deadpool.__main__ import main
sys.exit(main(sys.argv[1:]))
"""


@dataclasses.dataclass(slots=True)
class Running:
    process: subprocess.Popen[str]
    output: Path
    folder: Path

    def wait_for(self, text: str, count: int = 1) -> None:
        deadline = time.monotonic() + 30
        while self.output.read_text().count(text) < count:
            assert time.monotonic() < deadline, self.output.read_text()
            time.sleep(0.01)

    def end(self) -> tuple[int, str]:
        """Exit code and output; nothing is left of it."""
        code = self.process.wait(30)
        left = [
            process.pid
            for process in psutil.process_iter()
            if _mark_of(process) == str(self.folder)
        ]
        assert left == []
        assert os.listdir(self.folder / "tmp") == []
        return code, self.output.read_text()


def _mark_of(process: psutil.Process) -> str | None:
    try:
        gone = process.status() == psutil.STATUS_ZOMBIE
        return None if gone else process.environ().get("LAUNCHER_TEST")
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return None


@pytest.fixture
def start(tmp_path):
    """`start([first word, word after a restart], ...)`, a list for each node."""
    started = []

    def run(*nodes, flags=(), arguments=(), leave=0.2, signal_leave=20.0, more="", environ=None):
        (tmp_path / "tmp").mkdir()
        (tmp_path / "fake.py").write_text(SCRIPT)
        main = MAIN.format(leave=leave, signal_leave=signal_leave, more=more)
        sizes = ["--nodes", str(len(nodes)), "--ranks-per-node", "2", "--spare-nodes", "1"]
        output = tmp_path / "output"
        with open(output, "w") as file:
            process = subprocess.Popen(
                [
                    *(sys.executable, "-c", main, "launch", *sizes, *flags),
                    *(str(tmp_path / "fake.py"), "--deadpool", *arguments),
                ],
                cwd=tmp_path,
                env={
                    **{k: v for k, v in os.environ.items() if not k.startswith("DEADPOOL_")},
                    "PYTHONPATH": str(REPOSITORY),
                    "TMPDIR": str(tmp_path / "tmp"),
                    "LAUNCHER_TEST": str(tmp_path),
                    "NODES": json.dumps([n if isinstance(n, list) else [n, n] for n in nodes]),
                    **(environ or {}),
                },
                stdout=file,
                stderr=subprocess.STDOUT,
                text=True,
            )
        started.append(process)
        return Running(process, output, tmp_path)

    yield run
    for process in started:
        if process.poll() is None:
            process.kill()
            process.wait()


@pytest.mark.parametrize(
    ("nodes", "expected"),
    [
        (["exit0", "exit0", "exit0"], 0),
        (["kill", "exit0", "wait"], 0),
        (["wait", "exit3", "wait"], 3),
        (["exit72", "exit5", "kill"], 5),
    ],
)
def test_job_ends_with_what_its_nodes_say(start, nodes, expected):
    assert start(*nodes).end()[0] == expected


def test_loss_of_every_node_is_said(start):
    code, output = start("kill", "exit72", "kill").end()
    assert code == 1
    assert "deadpool: every node is lost" in output
    assert "node 1 with 72" in output and "node 0 with 137" in output


def test_loss_of_some_nodes_does_not_end_the_job(start):
    running = start("kill", "exit72", "wait", "exit6", "exit70")
    running.wait_for("node 2 rank", 2)
    time.sleep(0.5)  # More than it would leave the others after an end.
    assert running.process.poll() is None
    running.process.send_signal(signal.SIGTERM)
    assert running.end()[0] == 143


def test_lost_node_is_started_anew_and_joins(start, tmp_path):
    running = start(["kill", "last"], ["exit72", "wait"], "wait", flags=["--restart-lost-nodes"])
    code, output = running.end()
    assert code == 0, output
    assert (tmp_path / "seen-0-0").read_text() == "0\n1\n"
    assert (tmp_path / "seen-1-1").read_text() == "1\n1\n"


def test_lost_node_is_not_started_anew_unasked(start, tmp_path):
    running = start("kill", "wait", "wait")
    running.wait_for("waits", 4)
    running.process.send_signal(signal.SIGINT)
    assert running.end()[0] == 130
    assert (tmp_path / "seen-0-0").read_text() == "0\n"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signal_reaches_every_guardian_and_no_trainer(start, number):
    running = start("wait", "wait", "wait")
    running.wait_for("waits", 6)
    running.process.send_signal(number)
    code, output = running.end()
    assert code == 128 + number
    assert output.count(f"got {int(number)}") == 6
    assert output.count("trainer alive") == 6, output


def test_sigterm_that_drains_ends_with_success(start):
    running = start("drain", "drain", "drain", arguments=["--exit-signal-handler"])
    running.wait_for("waits", 6)
    running.process.send_signal(signal.SIGTERM)
    assert running.end()[0] == 0


@pytest.mark.parametrize("arguments", [[], ["--exit-signal-handler"]])
def test_second_signal_kills_those_that_do_not_end(start, arguments):
    running = start("deaf", "deaf", "deaf", arguments=arguments)
    running.wait_for("waits", 6)
    running.process.send_signal(signal.SIGTERM)
    running.wait_for("got 15", 6)
    running.process.send_signal(signal.SIGTERM)
    assert running.end()[0] == 143


def test_nodes_that_do_not_end_after_a_signal_are_killed(start):
    running = start("deaf", "deaf", "deaf", signal_leave=0.2)
    running.wait_for("waits", 6)
    running.process.send_signal(signal.SIGINT)
    assert running.end()[0] == 130


def test_signal_as_a_node_starts_is_not_lost(start):
    """It comes before the node's process is ready for it, and before the ranks' scripts run."""
    more = """
import os, signal
started = launcher._Nodes._node_started
def node_started(self, node, pid):
    started(self, node, pid)
    if self._signalled is None and node == 0:
        self._on_signal(signal.SIGINT)
launcher._Nodes._node_started = node_started
"""
    assert start("default", "default", "default", signal_leave=60, more=more).end()[0] == 130


def test_signal_during_the_check_ends_it(start):
    running = start("wait", "wait", "wait", environ={"CHECK_CODE": "99"})
    running.wait_for("checking")
    running.process.send_signal(signal.SIGTERM)
    code, output = running.end()
    assert code == 143 and "waits" not in output


def test_failed_check_starts_nothing(start):
    code, output = start("wait", "wait", "wait", environ={"CHECK_CODE": "2"}).end()
    assert code == 2 and "waits" not in output


def test_launcher_killed_leaves_no_process(start, tmp_path):
    running = start("wait", "wait", "wait")
    running.wait_for("waits", 6)
    running.process.kill()
    running.process.wait()
    deadline = time.monotonic() + 10
    # The trainers of this test are not told to die with their parent.
    while True:
        left = [p for p in psutil.process_iter() if _mark_of(p) == str(tmp_path)]
        if all(process.name() == "sleep" for process in left):
            break
        assert time.monotonic() < deadline, left
        time.sleep(0.02)
    for process in left:
        process.kill()
