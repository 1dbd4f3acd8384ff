"""Whole jobs of the launcher, forked from the preloaded server, with everything they leave."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.deadpool.job_process import FAULTY_FLAGS, REPOSITORY, TRAINING_FLAGS, Job, reap_job

RunJob = Callable[..., Job]


@pytest.fixture(scope="session")
def data_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("data-cache")


@pytest.fixture(scope="session")
def run_job(
    fork_server: Any, tmp_path_factory: pytest.TempPathFactory, data_cache: Path
) -> Iterator[RunJob]:
    """`run_job(launch, arguments, timeout_s=120)` -> Job: `python -m deadpool launch *launch
    pretrain_gpt.py --deadpool *TRAINING_FLAGS *arguments`, in a process of its own.

    during(pid, log_dir): called with the launcher's pid while the job runs. drop: flags of
    TRAINING_FLAGS to leave out, with their values.
    """

    def run(
        launch: Sequence[str],
        arguments: Sequence[str],
        *,
        timeout_s: float = 120.0,
        during: Callable[[int, Path], None] | None = None,
        script: str = "pretrain_gpt.py",
        drop: Sequence[str] = (),
        environ: Mapping[str, str] | None = None,
    ) -> Job:
        folder = tmp_path_factory.mktemp("job")
        data = REPOSITORY / "tests" / "golden" / "licenses_bytes"
        argv = [
            *("launch", *launch, str(REPOSITORY / script), "--deadpool"),
            *("--deadpool-log-dir", str(folder / "log"), *_without(TRAINING_FLAGS, drop)),
            *("--data-path", str(data), "--data-cache-path", str(data_cache), *arguments),
        ]
        reader, writer = fork_server.Pipe(duplex=False)
        process = fork_server.Process(
            target=reap_job, args=(writer, str(folder / "output"), argv, timeout_s, environ or {})
        )
        process.start()
        writer.close()
        try:
            launcher_pid = reader.recv()
            if during is not None:
                during(launcher_pid, folder / "log")
            assert reader.poll(timeout_s + 30), "the job's watcher did not answer"
            exit_code, left_over = reader.recv()
        finally:
            process.join(10)
            if process.is_alive():
                process.kill()
                process.join()
        return Job(
            exit_code=exit_code,
            output=(folder / "output").read_text(errors="replace"),
            left_over=left_over,
            log_dir=folder / "log",
        )

    yield run


def _without(flags: Sequence[str], names: Sequence[str]) -> list[str]:
    kept, dropping = [], False
    for word in flags:
        if word.startswith("--"):
            dropping = word in names
        if not dropping:
            kept.append(word)
    return kept


@pytest.fixture(scope="session")
def peace(run_job: RunJob) -> Callable[..., Job]:
    """The unfailed run of a grid, once for all tests that compare with it."""
    jobs: dict[tuple[str, ...], Job] = {}

    def get(launch: Sequence[str], arguments: Sequence[str], drop: Sequence[str] = ()) -> Job:
        key = (*launch, *arguments, *drop)
        if key not in jobs:
            jobs[key] = run_job(launch, arguments, drop=drop)
            jobs[key].check_clean()
        return jobs[key]

    return get


@pytest.fixture
def run_faulty(run_job: RunJob, tmp_path: Path) -> RunJob:
    """`run_faulty([{slot, iteration, phase, fault, times}, ...], *more flags)`: a job, of pipeline
    and data parallel size 2 if no other is given, with these faults: see `faulty_pretrain.py`."""

    def run(
        faults: Sequence[dict[str, Any]],
        *more: str,
        nodes: int = 3,
        spares: int = 1,
        grid: Sequence[str] = FAULTY_FLAGS,
        **settings: Any,
    ) -> Job:
        log_dir = tmp_path / "log"
        log_dir.mkdir()
        (log_dir / "faults.json").write_text(json.dumps(list(faults)))
        sizes = ["--nodes", str(nodes), "--ranks-per-node", "2", "--spare-nodes", str(spares)]
        flags = [*grid, *more, "--deadpool-log-dir", str(log_dir)]
        job = run_job(sizes, flags, script="tests/deadpool/faulty_pretrain.py", **settings)
        return dataclasses.replace(job, log_dir=log_dir)

    return run
