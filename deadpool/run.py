"""What a script does with `--deadpool`: check, guard, or say how to launch."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from deadpool.arena import Arena
from deadpool.config import ConfigError, RankEnvironment, grid_of_rank, parse_config
from deadpool.forkserver import PRELOAD
from deadpool.guardian import run_guardian
from deadpool.progress import ProgressBoard
from deadpool.protocol.types import Epoch
from deadpool.terminal import say

if TYPE_CHECKING:
    from deadpool.groups import GroupRegistry

Train = Callable[[Sequence[str], Any], int]


def _abort_before(registry: GroupRegistry, epoch: Epoch) -> None:
    """On the link's thread: free the main thread from the collectives of earlier epochs."""
    registry.abort(epoch - 1)


def _place_on_machine() -> tuple[str, str]:
    """Node and local rank as a launcher or Slurm says them, unchecked; "0" where neither does."""
    names = (("DEADPOOL_NODE", "SLURM_NODEID"), ("DEADPOOL_LOCAL_RANK", "SLURM_LOCALID"))
    node, local_rank = (os.environ.get(a) or os.environ.get(b) or "0" for a, b in names)
    return node, local_rank


def _check_quietly(
    argv: Sequence[str], check: Callable[[Sequence[str]], int], *, says: bool, notes: bool
) -> int:
    """Every task of a node comes to the same result: one of them says it, and one of the job the
    notes."""
    with open(os.devnull, "w") as nowhere, contextlib.ExitStack() as stack:
        if not (says and notes):
            stack.enter_context(contextlib.redirect_stdout(nowhere))
        if not says:
            stack.enter_context(contextlib.redirect_stderr(nowhere))
        try:
            return check(argv)
        except SystemExit as error:
            return error.code if isinstance(error.code, int) else 1


def main(argv: Sequence[str], *, train: Train, check: Callable[[Sequence[str]], int]) -> int:
    """Run one process of a DEADPOOL job, in the role that its launcher gave it.

    train(argv, hooks): the training script's body. check(argv): its input checks alone, once a
    launch of `deadpool launch` or `join`, and on each node of srun before the job forms.
    Returns the exit code.
    """
    if os.environ.get("DEADPOOL_ROLE") == "check":
        return check(argv)
    node, local_rank = _place_on_machine()
    try:
        config, _ = parse_config(argv)
        environment = RankEnvironment.from_environ(config.spare_nodes)
        grid = grid_of_rank(argv, environment)
        if config.log_dir is not None:
            os.makedirs(config.log_dir, exist_ok=True)
    except (ConfigError, OSError) as error:
        if local_rank == "0":
            say(f"deadpool: {error}", is_error=True)
        return 2
    os.environ["WORLD_SIZE"] = str(environment.world_size)

    def trainer_main(
        sock: socket.socket, arena: Arena, board: ProgressBoard, is_first: bool
    ) -> int:
        if is_first and not os.environ.get("DEADPOOL_NODE"):
            code = _check_quietly(argv, check, says=local_rank == "0", notes=node == "0")
            if code != 0:
                return code
        # Imported here: the guardian runs without torch.
        from deadpool.groups import GroupRegistry
        from deadpool.integrations.megatron import DeadpoolHooks
        from deadpool.link import GuardianLink

        registry = GroupRegistry()
        link = GuardianLink(sock, on_abort=lambda epoch: _abort_before(registry, epoch))
        hooks = DeadpoolHooks(
            config=config,
            environment=environment,
            link=link,
            registry=registry,
            arena=arena,
            board=board,
        )
        return train(argv, hooks)

    return run_guardian(config, environment, grid, trainer_main, PRELOAD)
