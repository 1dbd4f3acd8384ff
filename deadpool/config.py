"""DEADPOOL's flags, and the checks that need no torch.

`--deadpool...` flags stand beside Megatron's on one command line. The launcher and the guardians
read the few Megatron flags that placement needs with the same light parser; the trainer's full
parser adds the flags through `add_arguments`.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import math
import os
import signal
from collections.abc import Mapping, Sequence

from deadpool.injection import Flip, Injection, parse_injection
from deadpool.mpi.world import Launcher, find_launcher
from deadpool.progress import Vigil
from deadpool.protocol.placement import Grid, choose_holders
from deadpool.protocol.types import Bounds

_LEAVE_TIMEOUT_S = 5.0
"""How long a leader waits for its members to note the job's end."""

MIN_TOKEN_LENGTH = 32
"""Characters. Whoever sees a handshake can test guesses of the token: see `handshake`."""


NODES_HERE = "DEADPOOL_NODES_HERE"
"""Variable: how many of the job's nodes the machine bears whose input is checked; absent: 1."""


class ConfigError(Exception):
    """What was given, what fits, what to type."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DeadpoolConfig:
    """What the `--deadpool...` flags say."""

    save: str | None
    """Megatron's --save: also where snapshots are kept when the job ends for want of a node."""
    load: str | None
    log_dir: str | None
    """Folder of the JSON lines: losses.jsonl, events.jsonl, final.jsonl."""
    inject: tuple[Injection | Flip, ...]
    """Faults to cause, for demonstrations and tests."""
    start_timeout_s: float
    """Bound of forming the job, and of each phase before the first commit."""
    recovery_timeout_s: float
    """Bound of each phase of a recovery; past it, who did not answer counts as lost."""
    build_timeout_s: float
    """Bound of building the process groups of one epoch."""
    hang_timeout_s: float
    """Without progress for so long, a trainer hangs, or waits for one that does."""
    abort_timeout_s: float
    """How long a trainer may take to leave what it is in, once an epoch was announced."""
    error_grace_s: float
    """How long an error in a trainer waits for the news of a lost node that explains it."""
    commit_timeout_s: float
    """How long a step waits for the commit of the snapshot before it."""
    heartbeat_interval_s: float
    """The protocol's tick."""
    heartbeat_timeout_s: float
    """Without a heartbeat for so long, a member is lost, or a leader."""
    minority_timeout_s: float
    """How long guardians that cannot reach a majority wait before they end."""
    replicas: int
    """Of each slot's snapshots, each on another node."""
    snapshot_interval: int | None
    """Iterations between two snapshots; None: chosen as training goes."""
    waits_exhausted: bool
    """Where no spare node is left, wait for one to join, up to `exhausted_timeout_s`."""
    exhausted_timeout_s: float
    max_respawns: int
    """Trainers that a guardian starts in the place of dead ones within `respawn_window_s`."""
    respawn_window_s: float
    interface: str | None
    """Name, address or prefix: where guardians and trainers listen. See `interfaces`."""
    trace: bool
    """Every guardian writes its protocol events to `log_dir`."""
    transport: str
    """What brings replicas to their holders: tcp, mpi or auto."""
    mpi_launcher: Launcher | None
    """None: replicas go by TCP alone."""
    spare_nodes: int | None
    """For tasks of srun; None: not given."""
    drains_on_sigterm: bool
    """Megatron's --exit-signal-handler: SIGTERM has training save and finish."""

    def _ticks(self, seconds: float) -> int:
        return max(1, math.ceil(seconds / self.heartbeat_interval_s - 1e-9))

    def respawn_window(self) -> int:
        """In the protocol's ticks."""
        return self._ticks(self.respawn_window_s)

    def vigil(self) -> Vigil:
        return Vigil(
            hang=self._ticks(self.hang_timeout_s),
            first=max(self._ticks(self.start_timeout_s), self._ticks(self.hang_timeout_s)),
            abort=self._ticks(self.abort_timeout_s),
            tick_s=self.heartbeat_interval_s,
        )

    def bounds(self) -> Bounds:
        """The protocol's waits in its ticks, rounded up."""
        ticks = self._ticks
        silence = ticks(self.heartbeat_timeout_s)
        return Bounds(
            silence=silence,
            seek=2 * silence,
            minority=ticks(self.minority_timeout_s),
            start=ticks(self.start_timeout_s),
            recovery=ticks(self.recovery_timeout_s),
            leave=ticks(_LEAVE_TIMEOUT_S),
            lack=ticks(self.exhausted_timeout_s) if self.waits_exhausted else 0,
        )


_SECONDS = {
    "start-timeout": (600.0, "bound of the job's start"),
    "recovery-timeout": (120.0, "bound of each phase of a recovery"),
    "build-timeout": (20.0, "bound of building the process groups of an epoch"),
    "hang-timeout": (180.0, "without progress for so long, a trainer hangs or waits for one"),
    "abort-timeout": (15.0, "for leaving what it is in; who does not is killed, started anew"),
    "error-grace": (15.0, "how long a trainer's error waits for the news of a lost node"),
    "commit-timeout": (120.0, "how long a step waits for the previous snapshot's commit"),
    "heartbeat-interval": (1.0, "time between two heartbeats of a guardian"),
    "heartbeat-timeout": (5.0, "without a heartbeat for so long, a node or a leader is lost"),
    "minority-timeout": (60.0, "how long guardians without a majority seek one, then end"),
    "exhausted-timeout": (3600.0, "how long --deadpool-on-exhausted wait waits for a node"),
    "respawn-window": (3600.0, "time in which --deadpool-max-respawns is counted"),
}
"""Flag to default and help."""


@dataclasses.dataclass(frozen=True, slots=True)
class _Relation:
    """`flag`, in seconds, is at least the sum of `factor` x flag."""

    flag: str
    terms: tuple[tuple[int, str], ...]
    because: str


RELATIONS = (
    _Relation(
        "heartbeat-timeout",
        ((3, "heartbeat-interval"),),
        "one heartbeat that comes late is no loss",
    ),
    _Relation(
        "error-grace",
        ((2, "heartbeat-timeout"), (1, "heartbeat-interval")),
        "an error waits until silence shows a loss, and a successor of a lost leader says so",
    ),
    _Relation(
        "minority-timeout",
        ((4, "heartbeat-timeout"),),
        "a successor must be found before the search ends",
    ),
    _Relation(
        "recovery-timeout",
        ((2, "abort-timeout"),),
        "a trainer that does not answer is started anew, and answers, within a recovery",
    ),
    _Relation(
        "hang-timeout",
        ((2, "heartbeat-interval"),),
        "guardians look once an interval",
    ),
    _Relation(
        "recovery-timeout",
        ((1, "build-timeout"),),
        "a recovery contains the building of its groups",
    ),
    _Relation(
        "recovery-timeout",
        ((4, "heartbeat-timeout"),),
        "a loss during a recovery must show before the recovery is given up",
    ),
    _Relation(
        "commit-timeout",
        ((1, "minority-timeout"), (1, "heartbeat-timeout")),
        "a step outwaits the search for a leader",
    ),
)
"""The hierarchy of bounds; `_check_collectives` adds Megatron's own. Equality is allowed.

| bound | at least |
| --- | --- |
| heartbeat-timeout | 3 x heartbeat-interval |
| error-grace | 2 x heartbeat-timeout + heartbeat-interval |
| minority-timeout | 4 x heartbeat-timeout |
| hang-timeout | 2 x heartbeat-interval |
| recovery-timeout | build-timeout; 4 x heartbeat-timeout; 2 x abort-timeout |
| commit-timeout | minority-timeout + heartbeat-timeout |
| --distributed-timeout-minutes | more than heartbeat-timeout + error-grace |
"""


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
    for name, (default, meaning) in _SECONDS.items():
        group.add_argument(
            f"--deadpool-{name}",
            type=float,
            default=default,
            metavar="SECONDS",
            help=f"{meaning} (default: %(default)s)",
        )
    group.add_argument(
        "--deadpool-replicas",
        type=int,
        default=1,
        metavar="K",
        help="keep each snapshot on K other nodes, so that any K nodes may be lost at once "
        "(default: %(default)s)",
    )
    group.add_argument(
        "--deadpool-max-respawns",
        type=int,
        default=3,
        metavar="N",
        help="start a killed or crashed trainer anew on its node, N times within "
        "--deadpool-respawn-window; then the node counts as lost (default: %(default)s)",
    )
    group.add_argument(
        "--deadpool-on-exhausted",
        choices=("exit", "wait"),
        default="exit",
        help="a node is lost and no spare node is left: keep the state in memory under --save and "
        "end with exit code 3; or first wait for a node to join (default: %(default)s)",
    )
    group.add_argument(
        "--deadpool-snapshot-interval",
        default="1",
        metavar="N|auto",
        help="take a snapshot every N iterations; auto: as often as its copy can be hidden "
        "(default: %(default)s)",
    )
    group.add_argument(
        "--deadpool-interface",
        metavar="NAME|ADDRESS|PREFIX",
        help="where guardians and trainers listen: hsn0, 10.4.0.7 or 10.4.0.0/16",
    )
    group.add_argument(
        "--deadpool-transport",
        choices=("auto", "tcp", "mpi"),
        default="auto",
        help="what brings replicas to their holders; auto: the faster, where mpi4py and an MPI "
        "launcher are found, else tcp (default: %(default)s)",
    )
    group.add_argument(
        "--deadpool-mpi-launcher",
        metavar="COMMAND",
        help="starts the MPI sidecars, e.g. 'srun --mpi=pmi2' (default: srun in a Slurm job, else "
        "mpiexec)",
    )
    group.add_argument(
        "--deadpool-trace",
        action="store_true",
        help="every guardian writes its protocol events to --deadpool-log-dir",
    )
    group.add_argument(
        "--deadpool-spare-nodes",
        type=int,
        metavar="N",
        help="under srun: how many of its nodes are spare (default: 1)",
    )
    return parser


def _light_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(allow_abbrev=False, add_help=False, exit_on_error=False)
    add_arguments(parser)
    parser.add_argument("--tensor-model-parallel-size", type=int, default=1)
    parser.add_argument("--context-parallel-size", type=int, default=1)
    parser.add_argument("--pipeline-model-parallel-size", type=int, default=1)
    parser.add_argument("--use-tp-pp-dp-mapping", action="store_true")
    parser.add_argument("--save")
    parser.add_argument("--load")
    parser.add_argument("--distributed-timeout-minutes", type=float, default=10.0)
    parser.add_argument("--exit-signal-handler", action="store_true")
    parser.add_argument("--exit-signal", default=signal.SIGTERM.name)
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
    """args: of `parse_config`'s parser. Raises ConfigError where a value does not fit."""
    seconds = {name: getattr(args, _attribute(name)) for name in _SECONDS}
    for name, value in seconds.items():
        if not 0 < value < math.inf:  # NaN is not either.
            raise ConfigError(f"--deadpool-{name} {value:g}: give a number of seconds above 0")
    for relation in RELATIONS:
        _check_relation(relation, seconds)
    _check_collectives(args.distributed_timeout_minutes, seconds)
    if args.deadpool_trace and args.deadpool_log_dir is None:
        raise ConfigError("--deadpool-trace has no folder to write to: give --deadpool-log-dir DIR")
    if args.deadpool_spare_nodes is not None and args.deadpool_spare_nodes < 1:
        raise ConfigError(
            f"--deadpool-spare-nodes {args.deadpool_spare_nodes}: give at least 1, or leave "
            "--deadpool away"
        )
    if args.deadpool_max_respawns < 0:
        raise ConfigError(
            f"--deadpool-max-respawns {args.deadpool_max_respawns}: give a number from 0 on; with "
            "0 a dead trainer costs its node"
        )
    launcher: Launcher | str | None = None
    if args.deadpool_transport != "tcp":
        launcher = find_launcher(args.deadpool_mpi_launcher, os.environ)
    elif args.deadpool_mpi_launcher is not None:
        raise ConfigError("--deadpool-mpi-launcher has no use with --deadpool-transport tcp")
    if isinstance(launcher, str) and (
        args.deadpool_transport == "mpi" or args.deadpool_mpi_launcher
    ):
        raise ConfigError(
            f"--deadpool-transport {args.deadpool_transport}: {launcher}; or give "
            "--deadpool-transport tcp"
        )
    try:
        inject = tuple(parse_injection(spec) for spec in args.deadpool_inject)
    except ValueError as error:
        raise ConfigError(f"--deadpool-inject {error}") from error
    return DeadpoolConfig(
        save=args.save,
        load=args.load,
        log_dir=args.deadpool_log_dir,
        waits_exhausted=args.deadpool_on_exhausted == "wait",
        inject=inject,
        replicas=args.deadpool_replicas,
        max_respawns=args.deadpool_max_respawns,
        snapshot_interval=_snapshot_interval(args.deadpool_snapshot_interval),
        interface=args.deadpool_interface,
        trace=args.deadpool_trace,
        transport=args.deadpool_transport,
        mpi_launcher=launcher if isinstance(launcher, Launcher) else None,
        spare_nodes=args.deadpool_spare_nodes,
        drains_on_sigterm=args.exit_signal_handler and args.exit_signal == signal.SIGTERM.name,
        **{f"{name.replace('-', '_')}_s": value for name, value in seconds.items()},
    )


def _snapshot_interval(given: str) -> int | None:
    if given == "auto":
        return None
    if given.isdecimal() and int(given) > 0:
        return int(given)
    raise ConfigError(
        f"--deadpool-snapshot-interval {given}: give a number of iterations from 1 on, or auto"
    )


def _attribute(name: str) -> str:
    return f"deadpool_{name.replace('-', '_')}"


def _check_relation(relation: _Relation, seconds: Mapping[str, float]) -> None:
    given = seconds[relation.flag]
    least = sum(factor * seconds[name] for factor, name in relation.terms)
    if given >= least * (1 - 1e-9):
        return
    terms = " + ".join(
        f"{f'{factor} x ' if factor > 1 else ''}--deadpool-{name} {seconds[name]:g}"
        for factor, name in relation.terms
    )
    total = f" = {least:g}" if terms != f"--deadpool-{relation.terms[0][1]} {least:g}" else ""
    raise ConfigError(
        f"--deadpool-{relation.flag} {given:g} is shorter than {terms}{total}, but "
        f"{relation.because}: give at least --deadpool-{relation.flag} {least:g}, or a shorter "
        f"--deadpool-{relation.terms[0][1]}"
    )


def _check_collectives(minutes: float, seconds: Mapping[str, float]) -> None:
    heartbeat, grace = seconds["heartbeat-timeout"], seconds["error-grace"]
    if minutes * 60 > heartbeat + grace:
        return
    raise ConfigError(
        f"--distributed-timeout-minutes {minutes:g} ({minutes * 60:g} s) is not longer than "
        f"--deadpool-heartbeat-timeout {heartbeat:g} + --deadpool-error-grace {grace:g} = "
        f"{heartbeat + grace:g} s, so that a collective gives up before a loss shows: give at "
        f"least --distributed-timeout-minutes {math.floor((heartbeat + grace) / 60) + 1}"
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
    try:
        choose_holders(grid, config.replicas)
    except ValueError as error:
        raise ConfigError(f"--deadpool-replicas: {error}") from error
    for injection in config.inject:
        if injection.node >= num_nodes:
            raise ConfigError(
                f"--deadpool-inject {injection.name}={injection.node}: nodes are 0 to "
                f"{num_nodes - 1}"
            )
    return grid


def add_job_arguments(parser: argparse.ArgumentParser) -> None:
    """What both `launch` and `join` are told; the script and its arguments come last."""
    parser.add_argument(
        "--nodes", type=int, required=True, help="all nodes of the launch, spares included"
    )
    parser.add_argument("--ranks-per-node", type=int, default=1, help="default: %(default)s")
    parser.add_argument("--spare-nodes", type=int, default=1, help="default: %(default)s")
    parser.add_argument("script", help="pretrain_gpt.py")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="its arguments")


def checked_job(args: argparse.Namespace) -> tuple[DeadpoolConfig, Grid]:
    """What `launch` and `join` are asked for, checked as far as it goes without torch.

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
    if config.spare_nodes not in (None, args.spare_nodes):
        raise ConfigError(
            f"--spare-nodes {args.spare_nodes} and --deadpool-spare-nodes {config.spare_nodes} "
            "differ: leave --deadpool-spare-nodes, which is for srun, away, or give "
            f"--spare-nodes {config.spare_nodes}"
        )
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

    job_file: str | None
    """Where the job says how it is found: see `job_file`. None only with `contacts`."""
    contacts: tuple[tuple[str, int], ...]
    """Guardians of a running job, as `join` was told."""
    token: str | None
    """None: it is in the job file, or still to be made."""
    forms_job: bool
    """This guardian leads the launch. One of the job does: node 0, local rank 0."""
    node: int
    local_rank: int
    num_nodes: int
    """Of the launch, spares included."""
    ranks_per_node: int
    num_spare_nodes: int
    host: str | None
    """Where to listen; None: to be chosen, see `interfaces`."""

    @property
    def world_size(self) -> int:
        """Slots."""
        return (self.num_nodes - self.num_spare_nodes) * self.ranks_per_node

    def to_environ(self) -> dict[str, str]:
        """Empty values stand for absent ones, so that nothing is inherited by mistake."""
        return {
            "DEADPOOL_JOB_FILE": self.job_file or "",
            "DEADPOOL_CONTACTS": ",".join(map(format_address, self.contacts)),
            "DEADPOOL_TOKEN": self.token or "",
            "DEADPOOL_JOINS": "" if self.forms_job else "1",
            "DEADPOOL_NODE": str(self.node),
            "DEADPOOL_LOCAL_RANK": str(self.local_rank),
            "DEADPOOL_NUM_NODES": str(self.num_nodes),
            "DEADPOOL_RANKS_PER_NODE": str(self.ranks_per_node),
            "DEADPOOL_NUM_SPARE_NODES": str(self.num_spare_nodes),
            "DEADPOOL_HOST": self.host or "",
        }

    @classmethod
    def from_environ(cls, spare_nodes: int | None) -> RankEnvironment:
        """From DEADPOOL's own launcher, or from Slurm's variables.

        spare_nodes: --deadpool-spare-nodes; counts under Slurm alone. Raises ConfigError where
        this process was started by neither, or what they say does not fit.
        """
        if os.environ.get("DEADPOOL_NODE"):
            sizes = {
                "node": _number("DEADPOOL_NODE"),
                "local_rank": _number("DEADPOOL_LOCAL_RANK"),
                "num_nodes": _number("DEADPOOL_NUM_NODES"),
                "ranks_per_node": _number("DEADPOOL_RANKS_PER_NODE"),
                "num_spare_nodes": _number("DEADPOOL_NUM_SPARE_NODES"),
            }
        elif os.environ.get("SLURM_NODEID"):
            sizes = {**_slurm_sizes(), "num_spare_nodes": 1 if spare_nodes is None else spare_nodes}
        else:
            raise ConfigError(_NO_LAUNCHER)
        if sizes["local_rank"] >= sizes["ranks_per_node"]:
            raise ConfigError(
                f"local rank {sizes['local_rank']} of {sizes['ranks_per_node']} ranks per node: "
                "every node needs the same number of tasks; give srun --ntasks-per-node"
            )
        job_file = os.environ.get("DEADPOOL_JOB_FILE") or None
        contacts = os.environ.get("DEADPOOL_CONTACTS") or ""
        if job_file is None and not contacts:
            raise ConfigError(
                "DEADPOOL_JOB_FILE is not set: name a file on a file system that all nodes share, "
                "e.g. export DEADPOOL_JOB_FILE=$PWD/deadpool-$SLURM_JOB_ID.json"
            )
        is_first = sizes["node"] == 0 and sizes["local_rank"] == 0
        return cls(
            job_file=job_file,
            contacts=tuple(map(parse_address, filter(None, contacts.split(",")))),
            token=token_from_environ(),
            forms_job=is_first and not os.environ.get("DEADPOOL_JOINS"),
            host=os.environ.get("DEADPOOL_HOST") or None,
            **sizes,
        )


_NO_LAUNCHER = (
    "--deadpool needs a launcher. On one machine: `python -m deadpool launch --nodes N "
    "--ranks-per-node R --spare-nodes S pretrain_gpt.py --deadpool ...`. Under Slurm: `srun "
    "--no-kill python pretrain_gpt.py --deadpool --deadpool-spare-nodes S ...`, and "
    "DEADPOOL_JOB_FILE set"
)


def grid_of_rank(argv: Sequence[str], environment: RankEnvironment) -> Grid:
    """The grid that all ranks of the job share. Raises ConfigError."""
    config, args = parse_config(argv)
    return check_launch(
        args,
        config,
        num_nodes=environment.num_nodes,
        ranks_per_node=environment.ranks_per_node,
        num_spare_nodes=environment.num_spare_nodes,
    )


def token_from_environ() -> str | None:
    """DEADPOOL_TOKEN; None when it is not set. Raises ConfigError when it can be guessed."""
    token = os.environ.get("DEADPOOL_TOKEN") or None
    if token is not None and len(token) < MIN_TOKEN_LENGTH:
        raise ConfigError(
            f"DEADPOOL_TOKEN has {len(token)} characters, which can be guessed: give at least "
            f"{MIN_TOKEN_LENGTH} random ones, e.g. export DEADPOOL_TOKEN=$(openssl rand -hex 32)"
        )
    return token


def format_address(address: tuple[str, int]) -> str:
    """host:port, an IPv6 address in brackets."""
    host, port = address
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def parse_address(text: str) -> tuple[str, int]:
    """The inverse of `format_address`. Raises ConfigError."""
    host, _, port = text.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        host = ""
    if not host or not (port.isascii() and port.isdigit()) or not 0 < int(port) < 1 << 16:
        raise ConfigError(
            f"{text!r} is no address: give HOST:PORT, e.g. 10.4.0.7:41235 or [fd00::7]:41235"
        )
    return host, int(port)


def _number(*names: str) -> int:
    """The first of these variables that is set. Raises ConfigError."""
    for name in names:
        text = os.environ.get(name)
        if text:
            if not (text.isascii() and text.isdigit()):
                raise ConfigError(f"{name}={text}: a whole number, at least 0, is expected there")
            return int(text)
    raise ConfigError(f"{names[0]} is not set: start the tasks with srun or `deadpool launch`")


def _slurm_sizes() -> dict[str, int]:
    """Slurm's SLURM_NNODES may be the allocation's where the step's variables are set too."""
    num_nodes = _number("SLURM_STEP_NUM_NODES", "SLURM_NNODES")
    if os.environ.get("SLURM_STEP_NUM_TASKS") or os.environ.get("SLURM_NTASKS"):
        num_tasks = _number("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS")
        if num_nodes < 1 or num_tasks % num_nodes != 0:
            raise ConfigError(
                f"{num_tasks} tasks on {num_nodes} nodes: every node needs the same number; give "
                "srun --ntasks-per-node"
            )
        ranks_per_node = num_tasks // num_nodes
    else:
        ranks_per_node = _number("SLURM_NTASKS_PER_NODE")
    return {
        "node": _number("SLURM_NODEID"),
        "local_rank": _number("SLURM_LOCALID"),
        "num_nodes": num_nodes,
        "ranks_per_node": ranks_per_node,
    }
