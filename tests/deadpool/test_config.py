"""DEADPOOL's flags: what they become, and what a refusal says."""

from __future__ import annotations

import pytest

from deadpool.config import (
    ConfigError,
    RankEnvironment,
    check_launch,
    parse_config,
)
from deadpool.injection import Injection, InjectionPhase
from deadpool.protocol.placement import Grid

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


def test_flags_given_become_the_configuration() -> None:
    config, args = parse_config(
        "--num-layers 4 --deadpool --deadpool-log-dir out --deadpool-recovery-timeout 30 "
        "--deadpool-build-timeout 10 --deadpool-start-timeout 60 --deadpool-error-grace 2 "
        "--deadpool-commit-timeout 9 --deadpool-inject kill-node=1@iteration=7,phase=backward "
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
    assert config.commit_timeout_s == 9.0
    assert (args.tensor_model_parallel_size, args.use_tp_pp_dp_mapping) == (2, True)


def test_flags_absent_give_no_injection_and_no_folder() -> None:
    config, _ = parse_config([])
    assert config.inject == () and config.log_dir is None


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
    ("--deadpool-error-grace -1", {}, ["--deadpool-error-grace -1", "at least 0"]),
    ("--deadpool-error-grace nan", {}, ["--deadpool-error-grace nan", "at least 0"]),
    (
        "--deadpool-build-timeout 50 --deadpool-recovery-timeout 40",
        {},
        ["--deadpool-build-timeout 50", "at most", "--deadpool-recovery-timeout 40"],
    ),
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


ENVIRONMENT = RankEnvironment(
    leader=("::1", 4711), token="t", node=3, local_rank=1, world_size=8, host="127.0.0.1"
)


def test_rank_environment_comes_back_from_the_process_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in ENVIRONMENT.to_environ().items():
        monkeypatch.setenv(name, value)
    assert RankEnvironment.from_environ() == ENVIRONMENT


def test_rank_environment_of_no_launcher_says_how_to_launch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in (*ENVIRONMENT.to_environ(), "DEADPOOL_JOB_FILE", "SLURM_NODEID"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ConfigError) as refused:
        RankEnvironment.from_environ()
    said = str(refused.value)
    assert "python -m deadpool launch --nodes" in said and "python -m deadpool lead" in said
