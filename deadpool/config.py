"""DEADPOOL's flags, and the checks that need no torch.

`--deadpool...` flags stand beside Megatron's on one command line. The launcher and the guardians
read the few Megatron flags that placement needs with the same light parser; the trainer's full
parser adds the flags through `add_arguments`.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import json
import os
import socket
import time
from collections.abc import Sequence
from typing import Any

from deadpool.injection import Injection, parse_injection
from deadpool.protocol.placement import Grid, choose_holders


class ConfigError(Exception):
    """What was given, what fits, what to type."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DeadpoolConfig:
    """What the `--deadpool...` flags say."""

    log_dir: str | None
    """Folder of the JSON lines: losses.jsonl, events.jsonl, final.jsonl."""
    inject: tuple[Injection, ...]
    """Faults to cause, for demonstrations and tests."""
    start_timeout_s: float
    """Bound from the first hello until everybody trains."""
    recovery_timeout_s: float
    """Bound of each phase of a recovery; past it the job ends and says who did not answer."""
    build_timeout_s: float
    """Bound of building the process groups of one epoch."""
    error_grace_s: float
    """How long an error in a trainer waits for the news of a lost node that explains it."""
    commit_timeout_s: float
    """How long a step waits for the commit of the snapshot before it."""


def add_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add DEADPOOL's flags to a parser; also usable as Megatron's `extra_args_provider`."""
    group = parser.add_argument_group("deadpool", "fault tolerance")
    group.add_argument("--deadpool", action="store_true", help="survive the loss of nodes")
    group.add_argument(
        "--deadpool-log-dir",
        metavar="DIR",
        help="write losses, swaps and final parameter hashes there as JSON lines",
    )
    group.add_argument(
        "--deadpool-inject",
        action="append",
        default=[],
        metavar="SPEC",
        help="cause a fault, e.g. kill-node=1@iteration=7,phase=backward; may be given again",
    )
    group.add_argument(
        "--deadpool-start-timeout",
        type=float,
        default=600.0,
        metavar="SECONDS",
        help="bound of the job's start (default: %(default)s)",
    )
    group.add_argument(
        "--deadpool-recovery-timeout",
        type=float,
        default=120.0,
        metavar="SECONDS",
        help="bound of each phase of a recovery (default: %(default)s)",
    )
    group.add_argument(
        "--deadpool-build-timeout",
        type=float,
        default=20.0,
        metavar="SECONDS",
        help="bound of building the process groups of an epoch (default: %(default)s)",
    )
    group.add_argument(
        "--deadpool-error-grace",
        type=float,
        default=5.0,
        metavar="SECONDS",
        help="how long a trainer's error waits for the news of a lost node (default: %(default)s)",
    )
    group.add_argument(
        "--deadpool-commit-timeout",
        type=float,
        default=120.0,
        metavar="SECONDS",
        help="how long a step waits for the previous snapshot's commit (default: %(default)s)",
    )
    return parser


def _light_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(allow_abbrev=False, add_help=False, exit_on_error=False)
    add_arguments(parser)
    parser.add_argument("--tensor-model-parallel-size", type=int, default=1)
    parser.add_argument("--context-parallel-size", type=int, default=1)
    parser.add_argument("--pipeline-model-parallel-size", type=int, default=1)
    parser.add_argument("--use-tp-pp-dp-mapping", action="store_true")
    return parser


def parse_config(argv: Sequence[str]) -> tuple[DeadpoolConfig, argparse.Namespace]:
    """DEADPOOL's configuration and the few Megatron flags that placement needs.

    Raises ConfigError for a flag of DEADPOOL that is unknown or malformed.
    """
    parser = _light_parser()
    try:
        args, rest = parser.parse_known_args(list(argv))
    except argparse.ArgumentError as error:
        raise ConfigError(str(error)) from error
    known = [s for action in parser._actions for s in action.option_strings]
    for word in rest:
        name = word.split("=")[0]
        if name.startswith("--deadpool"):
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise ConfigError(f"{name} is not a flag of DEADPOOL{hint}")
    return config_from_args(args), args


def config_from_args(args: argparse.Namespace) -> DeadpoolConfig:
    """Raises ConfigError where a value does not fit."""
    for name in ("start", "recovery", "build", "commit"):
        value = getattr(args, f"deadpool_{name}_timeout")
        if not value > 0:  # NaN is not either.
            raise ConfigError(
                f"--deadpool-{name}-timeout {value}: give a number of seconds above 0"
            )
    if not args.deadpool_error_grace >= 0:
        raise ConfigError(
            f"--deadpool-error-grace {args.deadpool_error_grace}: give a number of seconds, at "
            "least 0"
        )
    if args.deadpool_build_timeout > args.deadpool_recovery_timeout:
        raise ConfigError(
            f"--deadpool-build-timeout {args.deadpool_build_timeout} is longer than the recovery "
            f"that contains it: give at most --deadpool-recovery-timeout "
            f"{args.deadpool_recovery_timeout}"
        )
    try:
        inject = tuple(parse_injection(spec) for spec in args.deadpool_inject)
    except ValueError as error:
        raise ConfigError(f"--deadpool-inject {error}") from error
    return DeadpoolConfig(
        log_dir=args.deadpool_log_dir,
        inject=inject,
        start_timeout_s=args.deadpool_start_timeout,
        recovery_timeout_s=args.deadpool_recovery_timeout,
        build_timeout_s=args.deadpool_build_timeout,
        error_grace_s=args.deadpool_error_grace,
        commit_timeout_s=args.deadpool_commit_timeout,
    )


def check_launch(
    args: argparse.Namespace,
    config: DeadpoolConfig,
    *,
    num_nodes: int,
    ranks_per_node: int,
    num_spare_nodes: int,
) -> Grid:
    """The grid of a launch, or ConfigError where nodes, spares and parallel sizes do not fit."""
    if num_nodes < 1 or ranks_per_node < 1 or num_spare_nodes < 0:
        raise ConfigError(
            f"--nodes {num_nodes} --ranks-per-node {ranks_per_node} --spare-nodes "
            f"{num_spare_nodes}: nodes and ranks are at least 1, spare nodes at least 0"
        )
    num_active = num_nodes - num_spare_nodes
    if num_active < 1:
        raise ConfigError(
            f"--spare-nodes {num_spare_nodes} of --nodes {num_nodes} leaves no node to train on: "
            f"give at most {num_nodes - 1} spare nodes, or more nodes"
        )
    if num_spare_nodes == 0:
        raise ConfigError(
            f"--spare-nodes 0 of --nodes {num_nodes}: no spare node would be left for the "
            f"{num_nodes} nodes that train; give --nodes {num_nodes + 1} --spare-nodes 1, or "
            "leave --deadpool away"
        )
    world_size = num_active * ranks_per_node
    tensor, context, pipeline = (
        args.tensor_model_parallel_size,
        args.context_parallel_size,
        args.pipeline_model_parallel_size,
    )
    for name, size in (
        ("tensor-model", tensor),
        ("context", context),
        ("pipeline-model", pipeline),
    ):
        if size < 1:
            raise ConfigError(f"--{name}-parallel-size {size}: give at least 1")
    model_ranks = tensor * context * pipeline
    if world_size % model_ranks != 0:
        raise ConfigError(
            f"{num_active} nodes x {ranks_per_node} ranks that train = {world_size}, which is not "
            f"a multiple of --tensor-model-parallel-size {tensor} x --context-parallel-size "
            f"{context} x --pipeline-model-parallel-size {pipeline} = {model_ranks}; change "
            f"--nodes, --spare-nodes or --ranks-per-node so that it is"
        )
    grid = Grid(
        world_size=world_size,
        ranks_per_node=ranks_per_node,
        tensor=tensor,
        context=context,
        pipeline=pipeline,
        pipeline_before_data=args.use_tp_pp_dp_mapping,
    )
    if num_active == 1:
        raise ConfigError(
            f"--nodes {num_nodes} --spare-nodes {num_spare_nodes}: training on one node leaves no "
            "other node to hold a replica, so that its loss would lose everything (data parallel "
            f"size is {grid.data}); give at least 2 nodes beside the spares"
        )
    choose_holders(grid)
    for injection in config.inject:
        if injection.node >= num_nodes:
            raise ConfigError(
                f"--deadpool-inject kill-node={injection.node}: nodes are 0 to {num_nodes - 1}"
            )
    return grid


def add_job_arguments(parser: argparse.ArgumentParser) -> None:
    """What both `launch` and `lead` are told; the script and its arguments come last."""
    parser.add_argument("--nodes", type=int, required=True, help="all nodes, spares included")
    parser.add_argument("--ranks-per-node", type=int, default=1, help="default: %(default)s")
    parser.add_argument("--spare-nodes", type=int, default=1, help="default: %(default)s")
    parser.add_argument("script", help="pretrain_gpt.py")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="its arguments")


def checked_job(args: argparse.Namespace) -> tuple[DeadpoolConfig, Grid]:
    """What `launch` and `lead` are asked for, checked as far as it goes without torch.

    args: nodes, ranks_per_node, spare_nodes, script and its arguments. Raises ConfigError.
    """
    if not os.path.isfile(args.script):
        raise ConfigError(f"{args.script}: no such script; give the path of pretrain_gpt.py")
    if "--deadpool" not in args.arguments:
        raise ConfigError(
            f"the arguments of {args.script} lack --deadpool: add it, or start the script with "
            "torchrun"
        )
    config, light = parse_config(args.arguments)
    grid = check_launch(
        light,
        config,
        num_nodes=args.nodes,
        ranks_per_node=args.ranks_per_node,
        num_spare_nodes=args.spare_nodes,
    )
    return config, grid


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RankEnvironment:
    """What a launcher tells one rank process through its environment."""

    leader: tuple[str, int]
    token: str
    node: int
    local_rank: int
    world_size: int
    host: str

    def to_environ(self) -> dict[str, str]:
        return {
            "DEADPOOL_LEADER": f"{self.leader[0]}:{self.leader[1]}",
            "DEADPOOL_TOKEN": self.token,
            "DEADPOOL_NODE": str(self.node),
            "DEADPOOL_LOCAL_RANK": str(self.local_rank),
            "DEADPOOL_WORLD_SIZE": str(self.world_size),
            "DEADPOOL_HOST": self.host,
        }

    @classmethod
    def from_environ(cls) -> RankEnvironment:
        """From DEADPOOL's own launcher, or from Slurm's variables and the leader's job file.

        Raises ConfigError where this process was started by neither.
        """
        environ = os.environ
        if "DEADPOOL_LEADER" in environ:
            return cls(
                leader=_address(environ["DEADPOOL_LEADER"]),
                token=environ["DEADPOOL_TOKEN"],
                node=int(environ["DEADPOOL_NODE"]),
                local_rank=int(environ["DEADPOOL_LOCAL_RANK"]),
                world_size=int(environ["DEADPOOL_WORLD_SIZE"]),
                host=environ["DEADPOOL_HOST"],
            )
        if "DEADPOOL_JOB_FILE" not in environ or "SLURM_NODEID" not in environ:
            raise ConfigError(
                "--deadpool needs a launcher. On one machine: `python -m deadpool launch --nodes N "
                "--ranks-per-node R --spare-nodes S pretrain_gpt.py --deadpool ...`. Under Slurm: "
                "`python -m deadpool lead` in the batch script, and DEADPOOL_JOB_FILE set for it "
                "and for srun"
            )
        job = _read_job_file(environ["DEADPOOL_JOB_FILE"])
        leader = _address(job["leader"])
        return cls(
            leader=leader,
            token=job["token"],
            node=int(environ["SLURM_NODEID"]),
            local_rank=int(environ["SLURM_LOCALID"]),
            world_size=int(job["world_size"]),
            host=environ.get("DEADPOOL_HOST") or _address_towards(leader),
        )


_JOB_FILE_TIMEOUT_S = 300.0
"""The leader checks the flags first, which imports torch from a file system under load."""


def _address(text: str) -> tuple[str, int]:
    host, port = text.rsplit(":", 1)
    return host, int(port)


def _read_job_file(path: str) -> dict[str, Any]:
    """Wait for the leader's file. Raises ConfigError when it does not come."""
    deadline = time.monotonic() + _JOB_FILE_TIMEOUT_S
    while time.monotonic() < deadline:
        try:
            with open(path) as file:
                return json.load(file)
        except FileNotFoundError:
            time.sleep(0.1)
    raise ConfigError(
        f"{path} (DEADPOOL_JOB_FILE) did not appear within {_JOB_FILE_TIMEOUT_S:g} s: is "
        "`python -m deadpool lead` running, and is the folder shared between the nodes?"
    )


def _address_towards(leader: tuple[str, int]) -> str:
    """This host's own address on the way to the leader. Sends nothing."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(leader)
        return probe.getsockname()[0]
