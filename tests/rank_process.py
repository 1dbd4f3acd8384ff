"""What `run_ranks` starts. Not in a conftest: there are two modules of that name, and a process is
forked by the name of its target."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any


def rank_main(
    writer: Connection,
    log_path: str,
    env: dict[str, str],
    target: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    descriptor = os.open(log_path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.environ.update(env)
    try:
        outcome = (True, target(*args))
    except BaseException as error:
        traceback.print_exc()
        outcome = (False, f"{type(error).__name__}: {error}")
    sys.stdout.flush()
    sys.stderr.flush()
    writer.send(outcome)
    writer.close()
    # Threads of process groups may wait for peers that are gone.
    os._exit(0 if outcome[0] else 1)
