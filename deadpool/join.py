"""`python -m deadpool join`: one more node, on this machine, for a job that runs.

It comes as a spare. A signal ends this node alone: the job goes on as after any loss.
"""

from __future__ import annotations

import argparse
import os

from deadpool import job_file
from deadpool.config import (
    MIN_TOKEN_LENGTH,
    ConfigError,
    RankEnvironment,
    add_job_arguments,
    checked_job,
    parse_address,
    token_from_environ,
)
from deadpool.launcher import NodeRun, run_nodes
from deadpool.terminal import say


def add_join_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "join",
        help="start a spare node for a job that runs",
        description="Start one node on this machine that joins a running job as a spare. The "
        "script and its arguments, the same as the job's, come last.",
    )
    parser.add_argument(
        "job",
        metavar="ADDRESS_OR_JOB_FILE",
        help="HOST:PORT of any guardian of the job, as its log says, or the job's job file",
    )
    parser.add_argument(
        "--token-file",
        metavar="FILE",
        help="holds the job's token, mode 0600; for an address (default: $DEADPOOL_TOKEN)",
    )
    parser.add_argument(
        "--node", type=int, required=True, help="number of this node: new, or a lost node's"
    )
    add_job_arguments(parser)
    parser.set_defaults(run=run_join)


def run_join(args: argparse.Namespace) -> int:
    """Returns the node's exit code; 2 for input that does not fit."""
    try:
        config, _ = checked_job(args)
        ranks = joining_ranks(args)
    except ConfigError as error:
        say(f"deadpool: {error}", is_error=True)
        return 2
    if config.log_dir is not None:
        os.makedirs(config.log_dir, exist_ok=True)
    outcome = run_nodes(
        NodeRun(
            script=args.script,
            arguments=tuple(args.arguments),
            ranks=ranks,
            restarts_lost_nodes=False,
            drains_on_sigterm=False,
            kills_on_signal=True,
        )
    )
    if outcome.check_code != 0:
        return outcome.check_code
    if outcome.signalled is not None:
        return 128 + outcome.signalled
    return outcome.ends[-1].code if outcome.ends else 1


def joining_ranks(args: argparse.Namespace) -> tuple[RankEnvironment, ...]:
    """What the node's ranks are told. Raises ConfigError."""
    if args.node < 0:
        raise ConfigError(f"--node {args.node}: give a number of at least 0")
    is_file = os.sep in args.job or os.path.exists(args.job)
    contacts = () if is_file else (parse_address(args.job),)
    token: str | None = None
    if is_file:
        if args.token_file is not None:
            raise ConfigError(
                f"--token-file {args.token_file}: the job file {args.job} holds the token; leave "
                "--token-file away, or give HOST:PORT instead of the file"
            )
        try:
            job_file.load(args.job)  # Its guardians read it again and again: it changes.
        except OSError as error:
            raise ConfigError(
                f"{args.job}: {error.strerror}; give the DEADPOOL_JOB_FILE of a job that runs, or "
                "HOST:PORT of one of its guardians"
            ) from error
    else:
        token = _token(args.token_file)
    return tuple(
        RankEnvironment(
            job_file=os.path.abspath(args.job) if is_file else None,
            contacts=contacts,
            token=token,
            forms_job=False,
            node=args.node,
            local_rank=local_rank,
            num_nodes=args.nodes,
            ranks_per_node=args.ranks_per_node,
            num_spare_nodes=args.spare_nodes,
            host=None,
        )
        for local_rank in range(args.ranks_per_node)
    )


def _token(path: str | None) -> str:
    if path is None:
        token = token_from_environ()
        if token is None:
            raise ConfigError(
                "the job's token is not known: set DEADPOOL_TOKEN, or give --token-file FILE"
            )
        return token
    try:
        token = job_file.read_private(path).decode("ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"--token-file {path} cannot be read ({error}): give a file with the job's token"
        ) from error
    if len(token) < MIN_TOKEN_LENGTH:
        raise ConfigError(
            f"--token-file {path} holds {len(token)} characters, which is no job's token: write "
            "the token of the job's DEADPOOL_JOB_FILE there"
        )
    return token
