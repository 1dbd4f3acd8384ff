"""What a script does with `--deadpool`: check, guard, or say how to launch."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from deadpool.arena import Arena
from deadpool.config import ConfigError, RankEnvironment, grid_of_rank, parse_config
from deadpool.guardian import run_guardian
from deadpool.protocol.types import Epoch

if TYPE_CHECKING:
    from deadpool.groups import GroupRegistry

Train = Callable[[Sequence[str], Any], int]


def _abort_before(registry: GroupRegistry, epoch: Epoch) -> None:
    """On the link's thread: free the main thread from the collectives of earlier epochs."""
    registry.abort(epoch - 1)


def main(argv: Sequence[str], *, train: Train, check: Callable[[Sequence[str]], int]) -> int:
    """Run one process of a DEADPOOL job, in the role that its launcher gave it.

    train(argv, hooks): the training script's body. check(argv): its input checks alone.
    Returns the exit code.
    """
    if os.environ.get("DEADPOOL_ROLE") == "check":
        return check(argv)
    try:
        config, _ = parse_config(argv)
        environment = RankEnvironment.from_environ(config.spare_nodes)
        grid = grid_of_rank(argv, environment)
        if config.log_dir is not None:
            os.makedirs(config.log_dir, exist_ok=True)
    except (ConfigError, OSError) as error:
        print(f"deadpool: {error}", file=sys.stderr)
        return 2
    os.environ["WORLD_SIZE"] = str(environment.world_size)

    def trainer_main(sock: socket.socket, arena: Arena) -> int:
        # Imported here: the guardian runs without torch.
        from deadpool.groups import GroupRegistry
        from deadpool.integrations.megatron import DeadpoolHooks
        from deadpool.link import GuardianLink

        registry = GroupRegistry()
        link = GuardianLink(sock, on_abort=lambda epoch: _abort_before(registry, epoch))
        hooks = DeadpoolHooks(
            config=config, environment=environment, link=link, registry=registry, arena=arena
        )
        return train(argv, hooks)

    return run_guardian(config, environment, grid, trainer_main)
