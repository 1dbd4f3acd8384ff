"""Releasing a thread from a gloo operation that no error will ever reach.

A gloo pair that breaks tells the operations that wait on it, except unbound sends that are partly
written or were refused with EPIPE: those are in its transmit queue, which it does not look through
(gloo as of torch 2.13, `Pair::signalException`). Whoever waits for such a send, directly or inside
a collective, waits out the group's timeout. So every wait is noted, and after an abort the ones
that stay are completed from outside.
"""

from __future__ import annotations

import ctypes
import logging
import re
import threading
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

from deadpool.native import native_pointer, torch_function, type_name

logger = logging.getLogger(__name__)

_SEND = "N4c10d16ProcessGroupGloo8SendWorkE"
_RECV = "N4c10d16ProcessGroupGloo8RecvWorkE"
_ABORT_SEND = "_ZN4c10d16ProcessGroupGloo8SendWork5abortEv"
_ABORT_RECV = "_ZN4c10d16ProcessGroupGloo8RecvWork5abortEv"
_FINISH = "_ZN4c10d4Work6finishENSt15__exception_ptr13exception_ptrE"


class WorkReleased(RuntimeError):
    """A wait was ended because its epoch was."""


_lock = threading.Lock()
_waiting: dict[int, Any] = {}
"""Thread identifier to the work it waits for."""
_released: set[int] = set()
"""Threads whose current wait was ended from outside."""
_original_wait: Any = None


def watch_waits() -> None:
    """Note every `Work.wait` from now on (half a microsecond each). Once per process."""
    global _original_wait
    if _original_wait is not None:
        return
    _original_wait = dist.Work.wait

    def wait(self: Any, *args: Any, **kwargs: Any) -> Any:
        thread = threading.get_ident()
        _waiting[thread] = self
        try:
            result = _original_wait(self, *args, **kwargs)
        finally:
            with _lock:
                del _waiting[thread]
                was_released = thread in _released
                _released.discard(thread)
        if was_released:
            raise WorkReleased("the epoch of this operation was aborted")
        return result

    dist.Work.wait = wait
    _watch_reduce_scatter()


class _ReduceScatterWork:
    """A reduce-scatter on gloo as what it is there, an all-reduce and a copy of one's own part.

    torch 2.13 wraps the all-reduce in a Work of its own whose inner wait cannot be reached.
    """

    def __init__(self, parts: list[tuple[Any, torch.Tensor, torch.Tensor]]) -> None:
        self._parts = parts

    def wait(self, *args: Any) -> bool:
        for work, output, own_part in self._parts:
            work.wait(*args)
            output.copy_(own_part)
        self._parts = []
        return True


def _watch_reduce_scatter() -> None:
    """Have gloo's reduce-scatters wait in Python, where `release` finds them."""
    # Newer torch calls them `..._single`, older `..._tensor_coalesced` and `_..._base`.
    coalesced_name, single_name = "reduce_scatter_single_coalesced", "reduce_scatter_single"
    if not hasattr(dist.ProcessGroup, single_name):
        coalesced_name, single_name = "reduce_scatter_tensor_coalesced", "_reduce_scatter_base"
    native_coalesced = getattr(dist.ProcessGroup, coalesced_name)
    native_single = getattr(dist.ProcessGroup, single_name)

    def begin(
        group: dist.ProcessGroup,
        outputs: list[torch.Tensor],
        inputs: list[torch.Tensor],
        options: Any,
    ) -> _ReduceScatterWork:
        all_reduce_options = dist.AllreduceOptions()
        all_reduce_options.reduceOp = options.reduceOp
        parts = []
        for output, value in zip(outputs, inputs, strict=True):
            buffer = value.clone()
            work = group.allreduce([buffer], all_reduce_options)
            own_part = buffer.view(group.size(), *output.shape)[group.rank()]
            parts.append((work, output, own_part))
        return _ReduceScatterWork(parts)

    def coalesced(
        self: Any, outputs: Any, inputs: Any, options: Any = _REDUCE_SCATTER_OPTIONS
    ) -> Any:
        if _is_gloo(self) and not inputs[0].is_cuda:
            return begin(self, outputs, inputs, options)
        return native_coalesced(self, outputs, inputs, options)

    def single(self: Any, output: Any, value: Any, options: Any = _REDUCE_SCATTER_OPTIONS) -> Any:
        if _is_gloo(self) and not value.is_cuda:
            return begin(self, [output], [value], options)
        return native_single(self, output, value, options)

    setattr(dist.ProcessGroup, coalesced_name, coalesced)
    setattr(dist.ProcessGroup, single_name, single)


_REDUCE_SCATTER_OPTIONS = dist.ReduceScatterOptions()


def _is_gloo(group: Any) -> bool:
    return c10d._world.pg_map.get(group, ("",))[0] == "gloo"


def waits() -> dict[int, int]:
    """Thread identifier to the identity of the work it waits for, at this moment."""
    return {thread: id(work) for thread, work in list(_waiting.items())}


def release(seen: dict[int, int]) -> int:
    """End the waits of `seen` (as `waits` gave them) that still last; returns how many.

    The released thread raises WorkReleased. A gloo thread that is stuck inside a collective stays
    so until the group's timeout; its backend is destroyed after that.
    """
    num_released = 0
    with _lock:
        for thread, identity in seen.items():
            work = _waiting.get(thread)
            if work is None or id(work) != identity or thread in _released:
                continue
            if _complete(work):
                _released.add(thread)
                num_released += 1
    return num_released


def _complete(work: Any) -> bool:
    pointer = native_pointer(work)
    kind = type_name(pointer) if torch_function(_FINISH, *_FINISH_TYPES) else ""
    if kind in (_SEND, _RECV):
        abort = torch_function(_ABORT_SEND if kind == _SEND else _ABORT_RECV, ctypes.c_void_p)
        if abort is not None:
            abort(pointer)
            return True
    elif re.match(r"N4c10d.*Async\w+WorkE$", kind):
        no_exception = ctypes.c_void_p(0)
        torch_function(_FINISH, *_FINISH_TYPES)(pointer, ctypes.byref(no_exception))
        return True
    logger.warning("cannot end a blocked %s: it waits out its timeout", kind or "operation")
    return False


_FINISH_TYPES = (ctypes.c_void_p, ctypes.c_void_p)
