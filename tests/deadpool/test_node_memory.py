"""What a node has left, read from sample texts, and the words of a refusal."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from deadpool.budget import node_needs
from deadpool.node_memory import (
    Limit,
    available,
    control_group_limits,
    read_text,
    refusal,
    show_bytes,
    tightest,
)
from deadpool.protocol.placement import Grid, choose_holders
from tests.deadpool.job_process import REPOSITORY, TRAINING_FLAGS

GIB = 1 << 30
MEMINFO = """\
MemTotal:       263725364 kB
MemFree:         3145728 kB
MemAvailable:   188743680 kB
Buffers:               4 kB
"""
V2_STAT = "anon 1000\nfile 5368709120\ninactive_file 4294967296\nactive_file 1073741824\n"
V1_STAT = "cache 0\ninactive_file 7\nhierarchical_memory_limit 9\ntotal_inactive_file 1073741824\n"


def reader(files: Mapping[str, str]):
    return files.get


def test_available_memory_is_what_the_kernel_says_in_bytes() -> None:
    assert available(reader({"/proc/meminfo": MEMINFO})) == Limit(
        num_bytes=180 * GIB, name="MemAvailable"
    )
    assert available(reader({})) is None
    assert available(reader({"/proc/meminfo": "MemTotal: 1 kB\n"})) is None


def test_control_groups_v2_count_every_level_and_give_the_cache_back() -> None:
    job = "/sys/fs/cgroup/system.slice/slurmstepd.scope/job_7"
    files = {
        "/proc/self/cgroup": "0::/system.slice/slurmstepd.scope/job_7/step_0/user/task_0\n",
        f"{job}/step_0/user/task_0/memory.max": "max\n",
        f"{job}/step_0/user/task_0/memory.current": "1000\n",
        f"{job}/step_0/memory.max": f"{120 * GIB}\n",
        f"{job}/step_0/memory.current": f"{10 * GIB}\n",
        f"{job}/step_0/memory.stat": V2_STAT,
        f"{job}/memory.max": f"{60 * GIB}\n",
        f"{job}/memory.current": f"{20 * GIB}\n",
    }
    limits = control_group_limits(reader(files))
    assert [limit.num_bytes for limit in limits] == [(120 - 10 + 4) * GIB, 40 * GIB]
    assert f"{job}/memory.max" in limits[1].name
    assert tightest(reader({**files, "/proc/meminfo": MEMINFO})) == limits[1]


def test_control_groups_v1_are_read_in_the_memory_hierarchy() -> None:
    folder = "/sys/fs/cgroup/memory/slurm/uid_1000/job_7"
    files = {
        "/proc/self/cgroup": "11:cpu,cpuacct:/else\n9:memory:/slurm/uid_1000/job_7\n0::/\n",
        f"{folder}/memory.limit_in_bytes": f"{32 * GIB}\n",
        f"{folder}/memory.usage_in_bytes": f"{2 * GIB}\n",
        f"{folder}/memory.stat": V1_STAT,
        "/sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
        "/sys/fs/cgroup/memory/memory.usage_in_bytes": "5\n",
    }
    (limit,) = control_group_limits(reader(files))
    assert limit.num_bytes == 31 * GIB
    assert "uid_1000/job_7/memory.limit_in_bytes" in limit.name


def test_control_group_of_a_container_is_the_mounts_root() -> None:
    """The path may be the host's, which is not there; and a group may be over its limit."""
    files = {
        "/proc/self/cgroup": "0::/../../kubepods/pod1\n",
        "/sys/fs/cgroup/memory.max": "4096\n",
        "/sys/fs/cgroup/memory.current": "8192\n",
    }
    assert [limit.num_bytes for limit in control_group_limits(reader(files))] == [0]


def test_machine_without_limits_is_bounded_by_what_is_available() -> None:
    files = {"/proc/self/cgroup": "0::/user.slice\n", "/proc/meminfo": MEMINFO}
    limit = tightest(reader(files))
    assert limit is not None and limit.name == "MemAvailable"
    assert tightest(reader({})) is None


def test_this_machine_says_a_plausible_limit() -> None:
    limit = tightest(read_text)
    assert limit is not None
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert 0 < limit.num_bytes <= pages


def refuse(
    sizes: Sequence[int], memory: Limit | None, *, here: int = 1, distributed: bool = False,
    file_size: Limit | None = None,
) -> str | None:  # fmt: skip
    grid = Grid(
        world_size=8, ranks_per_node=4, tensor=1, context=1, pipeline=1,
        pipeline_before_data=False,
    )  # fmt: skip
    needs = node_needs(grid, sizes, choose_holders(grid, 1), reserve_bytes_per_rank=GIB)
    return refusal(
        grid,
        needs,
        sizes,
        num_nodes_here=here,
        memory=memory,
        file_size=file_size,
        is_distributed=distributed,
    )


def has(num_bytes: int) -> Limit:
    return Limit(num_bytes=num_bytes, name="MemAvailable")


SIZES = [GIB] * 4 + [2 * GIB] * 4
HEADERS = 4 * 2 * 4096
NEED = (4 * 2 * 2 + 4 * 2 + 4) * GIB + HEADERS
"""Of the second node: its own, the first's replicas, the reserve."""


def test_refusal_starts_with_the_first_byte_that_is_lacking() -> None:
    assert refuse(SIZES, has(NEED)) is None
    assert refuse(SIZES, has(NEED - 1)) is not None
    assert refuse(SIZES, None) is None
    both = NEED + (4 * 2 + 4 * 2 * 2 + 4) * GIB + HEADERS
    assert refuse(SIZES, has(both), here=2) is None
    assert refuse(SIZES, has(both), here=5) is None  # Spares take no more.
    assert refuse(SIZES, has(both - 1), here=2) is not None


def test_refusal_says_the_numbers_and_what_to_change() -> None:
    text = refuse(SIZES, has(5 * GIB))
    assert text is not None
    for words in (
        "a slot's is up to 2.00 GiB",
        "a node needs 28.00 GiB",
        "4 slots x 2 buffers = 8.00 GiB",
        "4 replicas x 2 buffers = 16.00 GiB",
        "reserve 4.00 GiB",
        "5.00 GiB are left (MemAvailable)",
        "--use-distributed-optimizer, which cuts a snapshot to about 1/8",
        "fewer ranks a node than 4",
        "nodes with more memory",
    ):
        assert words in text, text
    text = refuse(SIZES, has(5 * GIB), distributed=True, here=3)
    assert text is not None
    assert "--use-distributed-optimizer" not in text
    assert "more data-parallel shards" in text
    assert "2 nodes on this machine need" in text


def test_refusal_of_files_that_may_not_be_so_large_names_the_limit() -> None:
    limit = Limit(num_bytes=4 * GIB + 2 * 4096, name="ulimit -f")
    assert refuse(SIZES, None, file_size=limit) is None
    short = Limit(num_bytes=limit.num_bytes - 1, name="ulimit -f")
    text = refuse(SIZES, None, file_size=short)
    assert text is not None and "ulimit -f" in text and "2.00 GiB" in text


def test_bytes_are_shown_with_their_unit() -> None:
    assert show_bytes(GIB) == "1.00 GiB"
    assert show_bytes(GIB - 1) == "1024.0 MiB"
    assert show_bytes(0) == "0.0 MiB"


# Whole launches, refused

FLAGS = [flag for flag in TRAINING_FLAGS if flag != "--deadpool-trace"]
HUGE = [*FLAGS, *"--hidden-size 65536 --num-layers 96 --train-iters 2".split()]
DATA = ["--data-path", str(REPOSITORY / "tests" / "golden" / "licenses_bytes")]
SCRIPT = [str(REPOSITORY / "pretrain_gpt.py"), "--deadpool", *HUGE, *DATA]
SIZE_FLAGS = "--nodes 3 --ranks-per-node 2 --spare-nodes 1".split()


def start(words: Sequence[str], folder: Path, **environ: str) -> subprocess.Popen[str]:
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("DEADPOOL_", "SLURM_"))}
    return subprocess.Popen(
        [sys.executable, *words, "--data-cache-path", str(folder)],
        env={**clean, "PYTHONPATH": str(REPOSITORY), "PYTHONWARNINGS": "ignore", **environ},
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def end(process: subprocess.Popen[str]) -> tuple[int, str]:
    try:
        output, _ = process.communicate(timeout=180)
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
    return process.returncode, output


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (["launch"], "2 nodes on this machine need"),
        (["join", "127.0.0.1:9", "--node", "7"], "a node needs"),
    ],
)
def test_launch_and_join_that_do_not_fit_start_nothing(
    command: list[str], words: str, tmp_path: Path
) -> None:
    token = {"DEADPOOL_TOKEN": "0123456789abcdef" * 4}
    code, output = end(start(["-m", "deadpool", *command, *SIZE_FLAGS, *SCRIPT], tmp_path, **token))
    assert code == 2, output
    assert output.count("do not fit in host memory") == 1 and words in output
    assert "building GPT model" not in output


def test_srun_tasks_that_do_not_fit_end_and_one_of_the_node_says_so(tmp_path: Path) -> None:
    tasks = [
        start(
            [*SCRIPT, "--deadpool-interface", "127.0.0.1"],
            tmp_path,
            SLURM_NODEID="1",
            SLURM_LOCALID=str(local_rank),
            SLURM_NNODES="3",
            SLURM_NTASKS="6",
            DEADPOOL_JOB_FILE=str(tmp_path / "job.json"),
        )
        for local_rank in range(2)
    ]
    (first, said), (second, silent) = [end(task) for task in tasks]
    assert (first, second) == (2, 2), said + silent
    assert said.count("do not fit in host memory") == 1 and "a node needs" in said
    assert "do not fit" not in silent


@pytest.mark.parametrize("local_rank", ["0", "1"])
def test_srun_on_one_node_is_refused_saying_why_once(tmp_path: Path, local_rank: str) -> None:
    slurm = {
        "SLURM_NODEID": "0",
        "SLURM_LOCALID": local_rank,
        "SLURM_NNODES": "2",
        "SLURM_NTASKS": "4",
        "DEADPOOL_JOB_FILE": str(tmp_path / "job.json"),
    }
    code, output = end(start(SCRIPT, tmp_path, **slurm))
    assert code == 2
    assert ("training on one node leaves no other node" in output) == (local_rank == "0")
