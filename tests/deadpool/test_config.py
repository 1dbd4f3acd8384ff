"""DEADPOOL's flags: what they become, and what a refusal says."""

from __future__ import annotations

import argparse
import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deadpool.config import (
    RELATIONS,
    ConfigError,
    DeadpoolConfig,
    RankEnvironment,
    add_job_arguments,
    check_launch,
    checked_job,
    format_address,
    grid_of_rank,
    parse_address,
    parse_config,
)
from deadpool.injection import Injection, InjectionPhase
from deadpool.protocol.placement import Grid
from deadpool.protocol.types import Bounds

FITS = {"num_nodes": 5, "ranks_per_node": 2, "num_spare_nodes": 1}


def launch(argv: str = "", **sizes: int) -> Grid:
    config, args = parse_config(argv.split())
    return check_launch(args, config, **{**FITS, **sizes})


def refusal(argv: str = "", **sizes: int) -> str:
    with pytest.raises(ConfigError) as refused:
        launch(argv, **sizes)
    said = str(refused.value)
    assert "\n" not in said
    return said


@pytest.mark.parametrize(("given", "interval"), [("1", 1), ("12", 12), ("auto", None)])
def test_snapshot_interval_is_a_number_or_auto(given: str, interval: int | None) -> None:
    config, _ = parse_config(["--deadpool-snapshot-interval", given])
    assert config.snapshot_interval == interval
    assert parse_config([])[0].snapshot_interval == 1


@pytest.mark.parametrize("given", ["0", "-3", "1.5", "often", ""])
def test_snapshot_interval_of_another_kind_is_refused(given: str) -> None:
    said = refusal(f"--deadpool-snapshot-interval={given}")
    assert given in said and "from 1 on, or auto" in said


def test_replicas_are_as_many_as_other_nodes_train() -> None:
    assert launch("--deadpool-replicas 3").num_nodes == 4
    for replicas in (0, 4):
        said = refusal(f"--deadpool-replicas {replicas}")
        assert f"--deadpool-replicas: {replicas} replicas on 4 nodes that train" in said
        assert "1 to 3" in said


def test_flags_given_become_the_configuration() -> None:
    config, args = parse_config(
        "--num-layers 4 --deadpool --deadpool-log-dir out --deadpool-recovery-timeout 30 "
        "--deadpool-build-timeout 10 --deadpool-start-timeout 60 --deadpool-error-grace 2 "
        "--deadpool-commit-timeout 9 --deadpool-heartbeat-interval 0.1 --deadpool-trace "
        "--deadpool-heartbeat-timeout 0.5 --deadpool-minority-timeout 7 "
        "--deadpool-interface hsn0 --deadpool-spare-nodes 3 --exit-signal-handler "
        "--deadpool-inject kill-node=1@iteration=7,phase=backward "
        "--deadpool-inject kill-node=0@iteration=9,phase=capture "
        "--tensor-model-parallel-size 2 --use-tp-pp-dp-mapping".split()
    )
    assert config.log_dir == "out"
    assert config.inject == (
        Injection(node=1, iteration=7, phase=InjectionPhase.BACKWARD),
        Injection(node=0, iteration=9, phase=InjectionPhase.CAPTURE),
    )
    assert (config.recovery_timeout_s, config.build_timeout_s) == (30.0, 10.0)
    assert (config.start_timeout_s, config.error_grace_s) == (60.0, 2.0)
    assert (config.commit_timeout_s, config.minority_timeout_s) == (9.0, 7.0)
    assert (config.heartbeat_interval_s, config.heartbeat_timeout_s) == (0.1, 0.5)
    assert (config.interface, config.spare_nodes, config.trace) == ("hsn0", 3, True)
    assert config.drains_on_sigterm
    assert (args.tensor_model_parallel_size, args.use_tp_pp_dp_mapping) == (2, True)


def test_flags_absent_give_no_injection_and_no_folder() -> None:
    config, _ = parse_config([])
    assert config.inject == () and config.log_dir is None
    assert config.interface is None and config.spare_nodes is None
    assert not config.trace and not config.drains_on_sigterm


def test_another_exit_signal_does_not_drain_on_sigterm() -> None:
    config, _ = parse_config(["--exit-signal-handler", "--exit-signal", "SIGUSR1"])
    assert not config.drains_on_sigterm


@pytest.mark.parametrize(
    ("argv", "sizes", "grid"),
    [
        ("", {}, (8, 2, 1, 1, 1, False)),
        (
            "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2",
            {},
            (8, 2, 2, 1, 2, False),
        ),
        (
            "--context-parallel-size 2 --use-tp-pp-dp-mapping",
            {"num_nodes": 3, "ranks_per_node": 4},
            (8, 4, 1, 2, 1, True),
        ),
    ],
)
def test_launch_that_fits_gives_the_grid_of_the_nodes_that_train(
    argv: str, sizes: dict[str, int], grid: tuple[int, int, int, int, int, bool]
) -> None:
    world_size, ranks_per_node, tensor, context, pipeline, pipeline_before_data = grid
    assert launch(argv, **sizes) == Grid(
        world_size=world_size,
        ranks_per_node=ranks_per_node,
        tensor=tensor,
        context=context,
        pipeline=pipeline,
        pipeline_before_data=pipeline_before_data,
    )


REFUSALS = [
    # command line, sizes, what the message must name: flags, what was given, what fits
    ("--deadpool-injcet x", {}, ["--deadpool-injcet", "--deadpool-inject"]),
    ("--deadpool-injcet=x", {}, ["--deadpool-injcet", "--deadpool-inject"]),
    ("--deadpoolish", {}, ["--deadpoolish", "--deadpool"]),
    ("--deadpool-start-timeout soon", {}, ["--deadpool-start-timeout", "soon"]),
    ("--deadpool-start-timeout 0", {}, ["--deadpool-start-timeout 0", "above 0"]),
    ("--deadpool-recovery-timeout -5", {}, ["--deadpool-recovery-timeout -5", "above 0"]),
    ("--deadpool-build-timeout 0", {}, ["--deadpool-build-timeout 0", "above 0"]),
    ("--deadpool-commit-timeout nan", {}, ["--deadpool-commit-timeout nan", "above 0"]),
    ("--deadpool-error-grace -1", {}, ["--deadpool-error-grace -1", "above 0"]),
    ("--deadpool-start-timeout inf", {}, ["--deadpool-start-timeout inf", "above 0"]),
    (
        "--deadpool-build-timeout 50 --deadpool-recovery-timeout 40",
        {},
        ["--deadpool-build-timeout 50", "at least", "--deadpool-recovery-timeout 50"],
    ),
    (
        "--deadpool-error-grace 5",
        {},
        ["--deadpool-error-grace 5", "2 x --deadpool-heartbeat-timeout 5", "= 11", "grace 11"],
    ),
    (
        "--distributed-timeout-minutes 1 --deadpool-error-grace 55",
        {},
        ["--distributed-timeout-minutes 1 (60 s)", "--deadpool-error-grace 55", "minutes 2"],
    ),
    ("--deadpool-trace", {}, ["--deadpool-trace", "--deadpool-log-dir"]),
    ("--deadpool-spare-nodes 0", {}, ["--deadpool-spare-nodes 0", "at least 1"]),
    ("--deadpool-inject bang", {}, ["--deadpool-inject", "'bang'", "kill-node=NODE@"]),
    (
        "--deadpool-inject kill-node=0@iteration=1,phase=lunch",
        {},
        ["--deadpool-inject", "'lunch'", "forward, backward, optimizer, capture, replicate"],
    ),
    (
        "--deadpool-inject kill-node=5@iteration=1,phase=forward",
        {},
        ["--deadpool-inject", "kill-node=5", "0 to 4"],
    ),
    ("", {"num_nodes": 0}, ["--nodes 0", "at least 1"]),
    ("", {"ranks_per_node": 0}, ["--ranks-per-node 0", "at least 1"]),
    ("", {"num_spare_nodes": -1}, ["--spare-nodes -1", "at least 0"]),
    ("", {"num_spare_nodes": 5}, ["--spare-nodes 5", "--nodes 5", "at most 4"]),
    ("", {"num_spare_nodes": 0}, ["--spare-nodes 0", "--nodes 6 --spare-nodes 1"]),
    ("", {"num_nodes": 2}, ["--nodes 2", "--spare-nodes 1", "at least 2 nodes"]),
    (
        "--tensor-model-parallel-size 3",
        {},
        ["--tensor-model-parallel-size 3", "= 8", "--nodes", "--ranks-per-node"],
    ),
    (
        "--pipeline-model-parallel-size 16",
        {},
        ["--pipeline-model-parallel-size 16", "= 8", "= 16"],
    ),
    ("--tensor-model-parallel-size two", {}, ["--tensor-model-parallel-size", "two"]),
    ("--tensor-model-parallel-size 0", {}, ["--tensor-model-parallel-size 0", "at least 1"]),
    ("--context-parallel-size -1", {}, ["--context-parallel-size -1", "at least 1"]),
    (
        "--pipeline-model-parallel-size 0",
        {},
        ["--pipeline-model-parallel-size 0", "at least 1"],
    ),
]


@pytest.mark.parametrize(
    ("argv", "sizes", "named"), REFUSALS, ids=[f"{a}{s or ''}" for a, s, _ in REFUSALS]
)
def test_launch_refused_names_flag_what_was_given_and_what_fits(
    argv: str, sizes: dict[str, int], named: list[str]
) -> None:
    said = refusal(argv, **sizes)
    assert all(word in said for word in named), said


# The hierarchy of bounds

FLAGS = sorted({r.flag for r in RELATIONS} | {name for r in RELATIONS for _, name in r.terms})


def config_of(seconds: dict[str, float], minutes: float = 1e6) -> DeadpoolConfig:
    words = [f"--deadpool-{name}={value!r}" for name, value in seconds.items()]
    return parse_config([*words, f"--distributed-timeout-minutes={minutes!r}"])[0]


def consistent(interval: float) -> dict[str, float]:
    """Every bound as short as the others allow."""
    seconds = {
        "heartbeat-interval": interval,
        "build-timeout": 12 * interval,
        "abort-timeout": 6 * interval,
    }
    for relation in RELATIONS:
        least = sum(factor * seconds[name] for factor, name in relation.terms)
        seconds[relation.flag] = max(least, seconds.get(relation.flag, 0.0))
    return seconds


@given(st.floats(1e-3, 1e3))
def test_shortest_consistent_bounds_are_taken(interval: float) -> None:
    config = config_of(consistent(interval))
    assert config.heartbeat_timeout_s == pytest.approx(3 * interval)
    assert config.bounds() == Bounds(
        silence=3, seek=6, minority=12, start=config.bounds().start, recovery=12,
        leave=config.bounds().leave,
    )  # fmt: skip


@pytest.mark.parametrize("relation", RELATIONS, ids=lambda r: f"{r.flag}, {r.terms[0][1]}")
@given(share=st.floats(0.01, 0.999))
def test_bound_below_its_least_is_refused(relation, share: float) -> None:
    seconds = consistent(1.0)
    least = sum(factor * seconds[name] for factor, name in relation.terms)
    seconds[relation.flag] = least * share
    with pytest.raises(ConfigError) as refused:
        config_of(seconds)
    said = str(refused.value)
    assert f"--deadpool-{relation.flag} {least * share:g} is shorter than" in said
    assert f"at least --deadpool-{relation.flag}" in said


@pytest.mark.parametrize("flag", FLAGS)
def test_following_the_advice_of_refusals_ends_at_consistent_bounds(flag: str) -> None:
    seconds = consistent(1.0)
    seconds[flag] *= 7
    for _ in range(2 * len(RELATIONS)):
        try:
            config_of(seconds)
            return
        except ConfigError as error:
            advice = str(error).partition("give at least --deadpool-")[2].split(",")[0].split()
            seconds[advice[0]] = float(advice[1])
    raise AssertionError(seconds)


@pytest.mark.parametrize(("minutes", "fits"), [(1 / 3, False), (0.34, True)])
def test_collectives_must_outlast_the_news_of_a_loss(minutes: float, fits: bool) -> None:
    if fits:
        config_of({}, minutes)
    else:
        with pytest.raises(ConfigError, match="is not longer than"):
            config_of({}, minutes)


@given(st.floats(0.001, 10.0), st.floats(3.0, 50.0))
def test_bounds_in_ticks_are_never_shorter_than_in_seconds(interval: float, ratio: float) -> None:
    config = config_of({"heartbeat-interval": interval, "heartbeat-timeout": interval * ratio,
                        "error-grace": 2000.0, "minority-timeout": 2500.0,
                        "recovery-timeout": 3000.0, "commit-timeout": 4000.0})  # fmt: skip
    bounds = config.bounds()
    for ticks, least_s in [
        (bounds.silence, config.heartbeat_timeout_s),
        (bounds.minority, config.minority_timeout_s),
        (bounds.start, config.start_timeout_s),
        (bounds.recovery, config.recovery_timeout_s),
        (bounds.leave, 5.0),
    ]:
        assert least_s - 1e-6 * interval <= ticks * interval
        assert (ticks - 1) * interval < least_s or ticks == 1
    assert bounds.seek == 2 * bounds.silence


def test_spare_nodes_given_twice_must_agree(tmp_path) -> None:
    script = tmp_path / "train.py"
    script.touch()
    parser = argparse.ArgumentParser()
    add_job_arguments(parser)
    words = f"--nodes 5 --spare-nodes 2 {script} --deadpool --deadpool-spare-nodes".split()
    assert checked_job(parser.parse_args([*words, "2"]))[1].world_size == 3
    with pytest.raises(ConfigError, match="--spare-nodes 2 and --deadpool-spare-nodes 1 differ"):
        checked_job(parser.parse_args([*words, "1"]))


# What a rank is told

TOKEN = "0123456789abcdef" * 2
ENVIRONMENTS = [
    RankEnvironment(
        job_file="/run/job.json", contacts=(), token=None, forms_job=True, node=0, local_rank=0,
        num_nodes=3, ranks_per_node=2, num_spare_nodes=1, host="127.0.0.1",
    ),
    RankEnvironment(
        job_file=None, contacts=(("::1", 4711), ("host", 1)), token=TOKEN, forms_job=False, node=0,
        local_rank=0, num_nodes=5, ranks_per_node=1, num_spare_nodes=2, host=None,
    ),
    RankEnvironment(
        job_file="job.json", contacts=(), token=TOKEN, forms_job=False, node=7, local_rank=3,
        num_nodes=5, ranks_per_node=4, num_spare_nodes=1, host="fd00::1",
    ),
]  # fmt: skip


@pytest.fixture
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name in list(os.environ):
        if name.startswith(("DEADPOOL_", "SLURM_")):
            monkeypatch.delenv(name)
    return monkeypatch


@pytest.mark.parametrize("environment", ENVIRONMENTS)
def test_rank_environment_comes_back_from_the_process_environment(
    no_launcher: pytest.MonkeyPatch, environment: RankEnvironment
) -> None:
    no_launcher.setenv("DEADPOOL_TOKEN", "x" * 40)  # Of the one who launched; told anew.
    for name, value in environment.to_environ().items():
        no_launcher.setenv(name, value)
    assert RankEnvironment.from_environ(spare_nodes=99) == environment


def test_grid_of_a_rank_is_that_of_the_launch() -> None:
    argv = ["--pipeline-model-parallel-size", "2"]
    grid = grid_of_rank(argv, ENVIRONMENTS[0])
    assert (grid.world_size, grid.ranks_per_node, grid.pipeline) == (4, 2, 2)
    assert ENVIRONMENTS[0].world_size == 4


SLURM = {
    "SLURM_NODEID": "2",
    "SLURM_LOCALID": "1",
    "SLURM_NNODES": "5",
    "SLURM_NTASKS": "20",
    "DEADPOOL_JOB_FILE": "job.json",
}


@pytest.mark.parametrize(
    ("changes", "spare_nodes", "expected"),
    [
        ({}, None, (False, 5, 4, 1)),
        ({}, 2, (False, 5, 4, 2)),
        ({"SLURM_NODEID": "0", "SLURM_LOCALID": "0"}, None, (True, 5, 4, 1)),
        (
            {"SLURM_NODEID": "0", "SLURM_LOCALID": "0", "DEADPOOL_JOINS": "1"},
            None,
            (False, 5, 4, 1),
        ),
        ({"SLURM_STEP_NUM_NODES": "4", "SLURM_STEP_NUM_TASKS": "8"}, None, (False, 4, 2, 1)),
        ({"SLURM_NTASKS": "", "SLURM_NTASKS_PER_NODE": "3"}, None, (False, 5, 3, 1)),
    ],
)
def test_rank_environment_under_slurm(
    no_launcher: pytest.MonkeyPatch,
    changes: dict[str, str],
    spare_nodes: int | None,
    expected: tuple[bool, int, int, int],
) -> None:
    for name, value in {**SLURM, **changes}.items():
        no_launcher.setenv(name, value)
    rank = RankEnvironment.from_environ(spare_nodes)
    found = (rank.forms_job, rank.num_nodes, rank.ranks_per_node, rank.num_spare_nodes)
    assert found == expected
    assert (rank.job_file, rank.contacts, rank.token, rank.host) == ("job.json", (), None, None)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"DEADPOOL_JOB_FILE": ""}, ["DEADPOOL_JOB_FILE is not set", "export DEADPOOL_JOB_FILE="]),
        ({"SLURM_NODEID": "two"}, ["SLURM_NODEID=two"]),
        ({"SLURM_NTASKS": "19"}, ["19 tasks on 5 nodes", "--ntasks-per-node"]),
        ({"SLURM_LOCALID": "4"}, ["local rank 4 of 4", "--ntasks-per-node"]),
        ({"SLURM_NNODES": ""}, ["SLURM_STEP_NUM_NODES is not set"]),
        ({"DEADPOOL_TOKEN": "guess"}, ["DEADPOOL_TOKEN has 5", "openssl rand -hex 32"]),
        ({"SLURM_NODEID": ""}, ["python -m deadpool launch --nodes", "srun", "DEADPOOL_JOB_FILE"]),
    ],
)
def test_rank_environment_that_does_not_fit_says_what_to_type(
    no_launcher: pytest.MonkeyPatch, changes: dict[str, str], named: list[str]
) -> None:
    for name, value in {**SLURM, **changes}.items():
        no_launcher.setenv(name, value)
    with pytest.raises(ConfigError) as refused:
        RankEnvironment.from_environ(None)
    assert all(word in str(refused.value) for word in named), str(refused.value)
    assert "guess" not in str(refused.value).replace("guessed", "")


@pytest.mark.parametrize("address", [("10.4.0.7", 41235), ("fd00::7", 1), ("nid001", 65535)])
def test_address_comes_back_from_its_text(address: tuple[str, int]) -> None:
    assert parse_address(format_address(address)) == address


@pytest.mark.parametrize("text", ["", "host", "host:", ":5", "host:0", "host:65536", "fd00::7:1"])
def test_text_that_is_no_address_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="HOST:PORT"):
        parse_address(text)
