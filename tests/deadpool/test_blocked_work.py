"""Waits that no error reaches are ended from outside, whatever the operation."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from deadpool import blocked_work

TIMEOUT = timedelta(minutes=10)
"""Of the group: far longer than a test may take."""

BOUND_S = 100.0


def coalesced(operation: Callable[[], Any], asynchronous: bool) -> None:
    with dist._coalescing_manager(dist.group.WORLD, async_ops=asynchronous) as manager:
        operation()
    if asynchronous:
        manager.wait()


def batch(part: torch.Tensor) -> None:
    sent, received = dist.P2POp(dist.isend, part, 1), dist.P2POp(dist.irecv, part.clone(), 1)
    for work in dist.batch_isend_irecv([sent, received]):
        work.wait()


OPERATIONS: dict[str, Callable[[torch.Tensor, torch.Tensor], Any]] = {
    "all_reduce": lambda part, whole: dist.all_reduce(part),
    "all_gather": lambda part, whole: dist.all_gather([part.clone(), part.clone()], part),
    "all_gather_into": lambda part, whole: dist.all_gather_into_tensor(whole, part),
    "reduce_scatter": lambda part, whole: dist.reduce_scatter_tensor(part, whole),
    "all_to_all": lambda part, whole: dist.all_to_all_single(whole.clone(), whole),
    "broadcast": lambda part, whole: dist.broadcast(part, src=1),
    "barrier": lambda part, whole: dist.barrier(),
    "receive": lambda part, whole: dist.recv(part, src=1),
    "send": lambda part, whole: dist.send(part, dst=1),
    "batch": lambda part, whole: batch(part),
    "coalesced_reduce_scatter": lambda part, whole: coalesced(
        lambda: dist.reduce_scatter_tensor(part, whole), False
    ),
    "coalesced_all_gather": lambda part, whole: coalesced(
        lambda: dist.all_gather_into_tensor(whole, part), True
    ),
}


def release_program(name: str) -> str:
    """Rank 0 begins an operation that rank 1 never joins, and is released from it."""
    blocked_work.watch_waits()
    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo", timeout=TIMEOUT)
    store = dist.distributed_c10d._get_default_store()
    if rank == 1:
        store.get("released")
        store.set("seen", "yes")
        return "absent"
    released = threading.Event()

    def release() -> None:
        seen: dict[int, int] = {}
        while not released.is_set():
            now = blocked_work.waits()
            lasting = {t: work for t, work in now.items() if seen.get(t) == work}
            if lasting and blocked_work.release(lasting):
                return
            seen = now
            released.wait(0.05)

    releaser = threading.Thread(target=release)
    releaser.start()
    try:
        # Larger than the sockets' buffers, so that a send stays in gloo's queue.
        OPERATIONS[name](torch.ones(8_000_000), torch.ones(16_000_000))
    except blocked_work.WorkReleased:
        return "released"
    finally:
        released.set()
        releaser.join()
        store.set("released", "yes")
        store.get("seen")  # The store lives in this process.
    return "returned"


@pytest.mark.parametrize("name", OPERATIONS)
def test_release_of_a_blocked_operation_raises_in_its_thread(run_ranks, name):
    assert run_ranks(2, release_program, name, timeout_s=BOUND_S) == ["released", "absent"]


def equality_program() -> int:
    """Reduce-scatters of many kinds, torch's own and then ours; how many were compared."""
    dist.init_process_group("gloo", timeout=TIMEOUT)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(rank)
    inputs = [
        (torch.randn(world_size * size) * 10 ** torch.randn(world_size * size)).to(dtype)
        for size in (1, 7, 1000, 100_003)
        for dtype in (torch.float32, torch.bfloat16, torch.float16)
    ]
    native = [reduce_scatter(value, world_size) for value in inputs]
    blocked_work.watch_waits()
    for value, expected in zip(inputs, native, strict=True):
        found = reduce_scatter(value, world_size)
        assert torch.equal(found.view(torch.uint8), expected.view(torch.uint8)), value.dtype
    return len(inputs)


def reduce_scatter(value: torch.Tensor, world_size: int) -> torch.Tensor:
    given = value.clone()
    output = torch.empty(value.numel() // world_size, dtype=value.dtype)
    dist.reduce_scatter_tensor(output, given)
    assert torch.equal(given.view(torch.uint8), value.view(torch.uint8)), "the input was changed"
    return output


def test_reduce_scatter_in_python_equals_torchs_own_in_every_bit(run_ranks):
    assert run_ranks(4, equality_program, timeout_s=BOUND_S) == [12] * 4
