"""megatron-core's checkpoint format, written by the rank itself.

megatron-core 0.16.1 writes through forked processes and collects their results in a manager
process, even when the caller waits: forking a rank copies the sockets of its process groups into
others, and the manager outlives a rank that is killed.
"""

from __future__ import annotations

import queue
from functools import partial
from typing import Any

from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest
from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync
from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy

BACKEND, VERSION = "torch_dist", 1


class InProcessSaveStrategy(TorchDistSaveShardedStrategy):
    """The torch_dist strategy without helper processes."""

    def __init__(self) -> None:
        super().__init__(BACKEND, VERSION, thread_count=1)

    def async_save(self, *args: Any, **kwargs: Any) -> AsyncRequest:
        """Plan the write; `save`, which waits, runs it."""
        filesystem_async._results_queue = queue.Queue()
        return super().async_save(*args, **kwargs)

    def _get_save_and_finalize_callbacks(self, writer: Any, planned: Any) -> AsyncRequest:
        request = super()._get_save_and_finalize_callbacks(writer, planned)
        if request.async_fn is None:
            return request
        transforms = [writer.transforms] if hasattr(writer, "transforms") else []
        return request._replace(async_fn=partial(_write, transforms))


def _write(transforms: list[Any], rank: int, buckets: list[Any], results: queue.Queue) -> None:
    """Write and sync every bucket's file; the results, or the first exception, go to `results`."""
    written: dict[int, Any] = {}
    for index, bucket in enumerate(buckets):
        answers: queue.Queue = queue.Queue()
        pending: queue.Queue = queue.Queue()
        pending.put(index)
        FileSystemWriterAsync.write_preloaded_data(
            transforms, index, bucket, answers, pending, use_fsync=True
        )
        _, answer = answers.get()
        if isinstance(answer, Exception):
            results.put(answer)
            return
        written[index] = answer
    results.put(written)
