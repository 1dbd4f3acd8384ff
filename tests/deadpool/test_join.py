"""`python -m deadpool join`: what its ranks are told, and how the node's end is passed on."""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys

import pytest

from deadpool import job_file
from deadpool.config import ConfigError, RankEnvironment
from deadpool.join import add_join_parser, joining_ranks
from tests.deadpool.job_process import REPOSITORY

TOKEN = "0123456789abcdef" * 4


def ranks(*words: str, node: str = "5") -> tuple[RankEnvironment, ...]:
    parser = argparse.ArgumentParser()
    add_join_parser(parser.add_subparsers())
    sizes = "--nodes 4 --ranks-per-node 2 --spare-nodes 1".split()
    options = [word for word in words if word.startswith("--")]
    values = [word for word in words if not word.startswith("--")]
    return joining_ranks(
        parser.parse_args(
            ["join", values[0], "--node", node, *options, *sizes, "train.py", "--deadpool"]
        )
    )


@pytest.fixture(autouse=True)
def no_token(monkeypatch):
    monkeypatch.delenv("DEADPOOL_TOKEN", raising=False)


def test_ranks_with_an_address_get_it_and_the_token(monkeypatch):
    monkeypatch.setenv("DEADPOOL_TOKEN", TOKEN)
    first, second = ranks("[fd00::1]:4711")
    assert first == RankEnvironment(
        job_file=None, contacts=(("fd00::1", 4711),), token=TOKEN, forms_job=False, node=5,
        local_rank=0, num_nodes=4, ranks_per_node=2, num_spare_nodes=1, host=None,
    )  # fmt: skip
    assert (second.local_rank, second.node) == (1, 5)


def test_ranks_with_a_job_file_read_the_token_themselves(tmp_path, monkeypatch):
    path = str(tmp_path / "job.json")
    job_file.write(path, TOKEN, [("10.0.0.1", 5)])
    monkeypatch.chdir(tmp_path)
    for given in (path, "./job.json", "job.json"):
        first, _ = ranks(given, node="0")
        assert (first.job_file, first.contacts, first.token) == (path, (), None)
        assert not first.forms_job


def test_token_file_is_read_and_must_be_private(tmp_path):
    path = tmp_path / "token"
    path.write_text(TOKEN + "\n")
    path.chmod(0o600)
    assert ranks("host:1", f"--token-file={path}")[0].token == TOKEN
    path.chmod(0o640)
    with pytest.raises(ConfigError, match="chmod 600"):
        ranks("host:1", f"--token-file={path}")


def test_what_does_not_fit_says_what_to_type(tmp_path, monkeypatch):
    with pytest.raises(ConfigError, match="set DEADPOOL_TOKEN, or give --token-file"):
        ranks("host:1")
    with pytest.raises(ConfigError, match="give HOST:PORT"):
        ranks("host")
    with pytest.raises(ConfigError, match="DEADPOOL_JOB_FILE of a job that runs"):
        ranks(str(tmp_path / "absent.json"))
    with pytest.raises(ConfigError, match="--node -1"):
        ranks("host:1", node="-1")
    with pytest.raises(ConfigError, match="cannot be read"):
        ranks("host:1", f"--token-file={tmp_path / 'absent'}")
    short = tmp_path / "short"
    short.write_text("short")
    short.chmod(0o600)
    with pytest.raises(ConfigError, match="holds 5 characters"):
        ranks("host:1", f"--token-file={short}")


SCRIPT = """
import os, signal, sys, time
from deadpool.terminal import say
if os.environ["DEADPOOL_ROLE"] == "guardian":
    assert os.environ["DEADPOOL_JOINS"] and os.environ["WORLD_SIZE"] == "6"
    signal.signal(signal.SIGTERM, lambda *_: say("guardian was told"))
    say(f"node {os.environ['DEADPOOL_NODE']} waits")
    if os.environ["CODE"] == "wait":
        while True:
            time.sleep(0.01)
    sys.exit(int(os.environ["CODE"]))
"""
MAIN = (
    "import sys; from deadpool import forkserver; forkserver.PRELOAD = (); "
    "from deadpool.__main__ import main; sys.exit(main(sys.argv[1:]))"
)


def start_join(tmp_path, code: str) -> subprocess.Popen[str]:
    (tmp_path / "fake.py").write_text(SCRIPT)
    sizes = "--node 5 --nodes 4 --ranks-per-node 2 --spare-nodes 1 fake.py --deadpool".split()
    environ = {"PYTHONPATH": str(REPOSITORY), "CODE": code, "DEADPOOL_TOKEN": TOKEN}
    return subprocess.Popen(
        [sys.executable, "-c", MAIN, "join", "127.0.0.1:9", *sizes],
        cwd=tmp_path,
        env={**os.environ, **environ},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@pytest.mark.parametrize("code", [0, 3, 70, 72])
def test_exit_code_is_the_nodes(tmp_path, code):
    process = start_join(tmp_path, str(code))
    output, _ = process.communicate(timeout=30)
    assert process.returncode == code, output
    assert output.count("node 5 waits") == 2


def test_signal_ends_the_node_without_telling_the_job(tmp_path):
    process = start_join(tmp_path, "wait")
    assert process.stdout is not None
    seen = [process.stdout.readline() for _ in range(2)]
    assert all("waits" in line for line in seen), seen
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=30)
    assert process.returncode == 143
    assert "guardian was told" not in output
