"""A job whose tasks srun starts: `python -m deadpool lead` and Slurm's variables."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys

import pytest

from deadpool.config import ConfigError, RankEnvironment
from tests.deadpool.job_process import REPOSITORY, TRAINING_FLAGS, Job

FLAGS = "--pipeline-model-parallel-size 2 --use-tp-pp-dp-mapping --bf16 --train-iters 6".split()
LAUNCH = "--nodes 3 --ranks-per-node 2 --spare-nodes 1".split()


def start(command, job_file, output, **environ):
    environ = {**os.environ, "DEADPOOL_JOB_FILE": str(job_file), "OMP_NUM_THREADS": "1", **environ}
    return subprocess.Popen(
        [sys.executable, *command],
        env=environ,
        stdout=output,
        stderr=subprocess.STDOUT,
        cwd=REPOSITORY,
        start_new_session=True,
    )


def test_job_under_slurm_variables_survives_a_loss(peace, data_cache, tmp_path):
    unfailed = peace(LAUNCH, FLAGS)
    job_file, log_dir = tmp_path / "job.json", tmp_path / "log"
    data = REPOSITORY / "tests" / "golden" / "licenses_bytes"
    script = [
        *("pretrain_gpt.py", "--deadpool", "--deadpool-log-dir", str(log_dir), *TRAINING_FLAGS),
        *("--data-path", str(data), "--data-cache-path", str(data_cache), *FLAGS),
        "--deadpool-inject=kill-node=1@iteration=4,phase=backward",
    ]
    lead = ["-m", "deadpool", "lead", "--host", "127.0.0.1", *LAUNCH]
    processes = []
    with open(tmp_path / "output", "w") as output:
        try:
            leader = start([*lead, *script], job_file, output)
            processes.append(leader)
            for node in range(3):
                for local_rank in range(2):
                    slurm = {"SLURM_NODEID": str(node), "SLURM_LOCALID": str(local_rank)}
                    processes.append(start(script, job_file, output, **slurm))
            exit_code = leader.wait(timeout=200)
            codes = [process.wait(timeout=60) for process in processes[1:]]
        finally:
            for process in processes:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()
    text = (tmp_path / "output").read_text(errors="replace")
    job = Job(exit_code=exit_code, output=text, left_over=[], log_dir=log_dir)
    job.check_clean()
    assert job.losses == unfailed.losses
    assert job.parameters == unfailed.parameters
    # One task of node 1 was killed, which costs the node; its other task is dismissed.
    assert sorted(codes) == [-9, 0, 0, 0, 0, 72]
    assert not job_file.exists()


def test_job_file_is_for_its_owner_alone(tmp_path):
    from deadpool.lead import _write_job_file

    path = tmp_path / "job.json"
    _write_job_file(path, ("127.0.0.1", 5000), "secret", 4)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_task_without_leader_says_what_to_type(tmp_path, monkeypatch):
    monkeypatch.delenv("DEADPOOL_LEADER", raising=False)
    monkeypatch.delenv("DEADPOOL_JOB_FILE", raising=False)
    with pytest.raises(ConfigError, match="deadpool launch"):
        RankEnvironment.from_environ()
    monkeypatch.setenv("DEADPOOL_JOB_FILE", str(tmp_path / "job.json"))
    monkeypatch.setenv("SLURM_NODEID", "0")
    monkeypatch.setattr("deadpool.config._JOB_FILE_TIMEOUT_S", 0.2)
    with pytest.raises(ConfigError, match="did not appear"):
        RankEnvironment.from_environ()
