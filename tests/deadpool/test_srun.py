"""A job whose tasks srun starts: Slurm's variables, a job file, and nothing else."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

from deadpool import job_file
from tests.deadpool.job_process import REPOSITORY, TRAINING_FLAGS, Job

FLAGS = "--pipeline-model-parallel-size 2 --use-tp-pp-dp-mapping --bf16 --train-iters 6".split()
LAUNCH = "--nodes 3 --ranks-per-node 2 --spare-nodes 1".split()


def start_task(command, output, **environ):
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(("DEADPOOL_", "SLURM_"))}
    return subprocess.Popen(
        [sys.executable, *command],
        env={**inherited, "OMP_NUM_THREADS": "1", **environ},
        stdout=output,
        stderr=subprocess.STDOUT,
        cwd=REPOSITORY,
        start_new_session=True,
    )


def test_job_under_slurm_variables_survives_a_loss(peace, data_cache, tmp_path):
    unfailed = peace(LAUNCH, FLAGS)
    path, log_dir = tmp_path / "job.json", tmp_path / "log"
    # What an earlier job left under the same name: a token that fits nobody, a dead address.
    job_file.write(str(path), "f" * 64, [("127.0.0.1", 9)])
    data = REPOSITORY / "tests" / "golden" / "licenses_bytes"
    script = [
        *("pretrain_gpt.py", "--deadpool", "--deadpool-log-dir", str(log_dir), *TRAINING_FLAGS),
        *("--data-path", str(data), "--data-cache-path", str(data_cache), *FLAGS),
        *("--deadpool-spare-nodes", "1", "--deadpool-interface", "127.0.0.1"),
        "--deadpool-inject=kill-node=1@iteration=4,phase=backward",
    ]
    tasks = []
    with open(tmp_path / "output", "w") as output:
        try:
            for node in reversed(range(3)):  # Who forms the job comes last.
                for local_rank in reversed(range(2)):
                    slurm = {
                        "SLURM_NODEID": str(node),
                        "SLURM_LOCALID": str(local_rank),
                        "SLURM_NNODES": "3",
                        "SLURM_NTASKS": "6",
                        "DEADPOOL_JOB_FILE": str(path),
                    }
                    tasks.append(start_task(script, output, **slurm))
            codes = [task.wait(timeout=200) for task in tasks]
        finally:
            for task in tasks:
                if task.poll() is None:
                    os.killpg(task.pid, signal.SIGKILL)
                    task.wait()
    text = (tmp_path / "output").read_text(errors="replace")
    # One task of node 1 was killed, which costs the node; its other task is dismissed.
    assert sorted(codes) == [-9, 0, 0, 0, 0, 72], (codes, text[-6000:])
    job = Job(exit_code=0, output=text, left_over=[], log_dir=log_dir)
    job.check_clean()
    assert [(swap["nodes_lost"], swap["spares_used"]) for swap in job.swaps] == [([1], [2])]
    assert job.losses == unfailed.losses
    assert job.parameters == unfailed.parameters
    assert not path.exists()
