"""What an exception in a trainer says about its cause."""

from __future__ import annotations

import os
from collections.abc import Iterator
from types import TracebackType

from deadpool.protocol.types import NON_FINITE

_COMMUNICATION = (
    os.path.join("torch", "distributed") + os.sep,
    os.path.join("deadpool", "blocked_work.py"),
)

_NON_FINITE = ("found NaN in local ", "found Inf in local ")
"""How megatron-core's checks of gradients, and the driver's of the loss, say it: before anything
is reduced, on the rank that first sees it."""


def is_of_communication(error: BaseException) -> bool:
    """Whether it was raised while this rank talked to others, so that a lost peer may explain it
    within seconds; otherwise the cause is here. Also where such an error caused this one."""
    return any(
        any(part in filename for part in _COMMUNICATION)
        for each in _with_causes(error)
        for filename in _files(each.__traceback__)
    )


def kind_of(error: BaseException) -> str:
    """What two errors of one cause have in common, whatever their words."""
    if isinstance(error, RuntimeError) and any(words in str(error) for words in _NON_FINITE):
        return NON_FINITE
    return f"{type(error).__module__}.{type(error).__qualname__}"


def describe(error: BaseException) -> str:
    """One line."""
    words = str(error).strip().splitlines()
    return f"{type(error).__name__}: {words[0]}" if words else type(error).__name__


def _with_causes(error: BaseException) -> Iterator[BaseException]:
    seen: set[int] = set()
    following: BaseException | None = error
    while following is not None and id(following) not in seen:
        seen.add(id(following))
        yield following
        following = following.__cause__ or following.__context__


def _files(traceback: TracebackType | None) -> Iterator[str]:
    while traceback is not None:
        yield traceback.tb_frame.f_code.co_filename
        traceback = traceback.tb_next
