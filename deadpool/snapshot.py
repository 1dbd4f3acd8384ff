"""Capture of a rank's state into the arena, and its restoration.

A snapshot is what training after iteration i depends on and no peer has: the optimizer shard,
module buffers, random-number states, counters. Parameters are not in it: they follow from the main
parameters (`deadpool.optimizer.rebuild_parameters`).
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import queue
import threading
from collections.abc import Callable
from typing import Any

import torch

from deadpool.arena import Arena
from deadpool.optimizer import initialize_state, load_scalar_state, scalar_state, shard_tensors
from deadpool.protocol.snapshots import NUM_BUFFERS, capture_buffer
from deadpool.protocol.types import Iteration, Slot

_ALIGNMENT = 64
_METADATA_BYTES = 1 << 18
"""Room for the JSON part; its first 8 bytes are its length."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """Where one tensor lies in a payload."""

    name: str
    offset: int
    """In bytes from the start of the payload, a multiple of 64."""
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def lay_out(tensors: dict[str, torch.Tensor]) -> tuple[list[Entry], int]:
    """Entries in the order given, behind the metadata, and the payload's size in bytes."""
    entries, offset = [], _METADATA_BYTES
    for name, tensor in tensors.items():
        entry = Entry(name=name, offset=offset, shape=tuple(tensor.shape), dtype=tensor.dtype)
        entries.append(entry)
        offset += -(-entry.num_bytes // _ALIGNMENT) * _ALIGNMENT
    return entries, offset


class SnapshotDamaged(Exception):
    """A snapshot does not belong to the model that was built here."""


class Snapshotter:
    """The trainer's side of one slot's arena. Main thread, except `_seal_when_copied`.

    collect_random, restore_random: the driver's random-number states, a flat dict of CPU tensors
    of fixed shapes. on_captured(iteration, buffer): the buffer is whole. on_halfway(iteration):
    half of the tensors are copied (fault injection).
    """

    def __init__(
        self,
        *,
        arena: Arena,
        slot: Slot,
        model: list[Any],
        optimizer: Any,
        collect_random: Callable[[], dict[str, torch.Tensor]],
        restore_random: Callable[[dict[str, torch.Tensor]], None],
        on_captured: Callable[[Iteration, int], None],
        on_halfway: Callable[[Iteration], None],
    ) -> None:
        initialize_state(optimizer)
        self._arena = arena
        self._slot = slot
        self._model = model
        self._optimizer = optimizer
        self._collect_random = collect_random
        self._restore_random = restore_random
        self._on_captured = on_captured
        self._on_halfway = on_halfway
        self._live = shard_tensors(optimizer)
        for index, chunk in enumerate(model):
            for name, value in chunk.named_buffers():
                self._live[f"buffer{index}/{name}"] = value
        random_state = {f"random/{k}": v for k, v in collect_random().items()}
        self._entries, payload_bytes = lay_out({**self._live, **random_state})
        self._digest = _digest(self._entries)
        arena.resize(payload_bytes)
        self._views = [self._map_buffer(buffer) for buffer in range(NUM_BUFFERS)]
        self._on_device = any(t.is_cuda for t in self._live.values())
        self._stream: Any = None
        self._copied: Any = None
        self._queue: queue.Queue[tuple[Any, Iteration, int] | None] = queue.Queue()
        self._thread: threading.Thread | None = None
        if self._on_device:
            self._pin()
            self._stream = torch.cuda.Stream()
            self._thread = threading.Thread(
                target=self._seal_when_copied, name="deadpool-capture", daemon=True
            )
            self._thread.start()

    @property
    def payload_bytes(self) -> int:
        return self._arena.payload_bytes

    def _map_buffer(self, buffer: int) -> dict[str, torch.Tensor]:
        payload = torch.frombuffer(self._arena.payload(buffer), dtype=torch.uint8)
        return {
            entry.name: payload[entry.offset : entry.offset + entry.num_bytes]
            .view(entry.dtype)
            .view(entry.shape)
            for entry in self._entries
        }

    def _pin(self) -> None:
        """Page-lock the arena for asynchronous copies (cudaHostRegister)."""
        for buffer in range(NUM_BUFFERS):
            payload = torch.frombuffer(self._arena.payload(buffer), dtype=torch.uint8)
            error = torch.cuda.cudart().cudaHostRegister(payload.data_ptr(), payload.numel(), 0)
            if int(error) != 0:
                raise RuntimeError(
                    f"cudaHostRegister of {payload.numel()} bytes of snapshot memory failed with "
                    f"error {int(error)}; raise the locked-memory limit (ulimit -l)"
                )

    # Capture

    def capture_tensors(self, iteration: Iteration) -> None:
        """Begin to copy the optimizer's tensors: on a side stream with a GPU, at once without.

        Before anything overwrites them, `wait_copied` must have returned.
        """
        buffer = capture_buffer(iteration)
        self._arena.invalidate(buffer)
        views = self._views[buffer]
        if not self._on_device:
            self._copy(iteration, views, non_blocking=False)
            return
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            self._copy(iteration, views, non_blocking=True)
            self._copied = torch.cuda.Event()
            self._copied.record()

    def _copy(
        self, iteration: Iteration, views: dict[str, torch.Tensor], *, non_blocking: bool
    ) -> None:
        middle = len(self._live) // 2
        with torch.no_grad():
            for index, (name, tensor) in enumerate(self._live.items()):
                if index == middle:
                    self._on_halfway(iteration)
                views[name].copy_(tensor, non_blocking=non_blocking)

    def seal(self, iteration: Iteration, metadata: dict[str, Any]) -> None:
        """Add the random-number states and counters of the same iteration; the snapshot is then
        labelled, as soon as the tensors are copied."""
        buffer = capture_buffer(iteration)
        for name, value in self._collect_random().items():
            self._views[buffer][f"random/{name}"].copy_(value)
        self._write_metadata(buffer, {**metadata, "optimizer": scalar_state(self._optimizer)})
        if self._on_device:
            self._queue.put((self._copied, iteration, buffer))
        else:
            self._finish(iteration, buffer)

    def _finish(self, iteration: Iteration, buffer: int) -> None:
        self._arena.label(buffer, self._slot, iteration)
        self._on_captured(iteration, buffer)

    def _seal_when_copied(self) -> None:
        while (item := self._queue.get()) is not None:
            copied, iteration, buffer = item
            copied.synchronize()
            self._finish(iteration, buffer)

    def wait_copied(self) -> None:
        """Until the last capture no longer reads the live tensors."""
        if self._copied is not None:
            self._copied.synchronize()

    def close(self) -> None:
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join(10.0)

    # Restoration

    def load_tensors(self, buffer: int) -> None:
        """Snapshot to live tensors."""
        with torch.no_grad():
            for name, tensor in self._live.items():
                tensor.copy_(self._views[buffer][name])

    def load_rest(self, buffer: int) -> dict[str, Any]:
        """Random-number states and optimizer scalars into place; returns the other metadata.

        Raises SnapshotDamaged where the snapshot is of another layout.
        """
        metadata = self._read_metadata(buffer)
        if metadata.pop("digest") != self._digest:
            raise SnapshotDamaged(
                f"the snapshot of slot {self._slot} was taken of another model layout"
            )
        random_names = [e.name for e in self._entries if e.name.startswith("random/")]
        self._restore_random(
            {
                name.removeprefix("random/"): self._views[buffer][name].clone()
                for name in random_names
            }
        )
        load_scalar_state(self._optimizer, metadata.pop("optimizer"))
        return metadata

    def _write_metadata(self, buffer: int, metadata: dict[str, Any]) -> None:
        body = json.dumps({**metadata, "digest": self._digest}).encode()
        if len(body) > _METADATA_BYTES - 8:
            raise RuntimeError(f"snapshot metadata of {len(body)} bytes, room is for 256 KiB")
        payload = self._arena.payload(buffer)
        payload[:8] = len(body).to_bytes(8, "little")
        payload[8 : 8 + len(body)] = body

    def _read_metadata(self, buffer: int) -> dict[str, Any]:
        payload = self._arena.payload(buffer)
        length = int.from_bytes(payload[:8], "little")
        return json.loads(bytes(payload[8 : 8 + length]))


def _digest(entries: list[Entry]) -> str:
    text = ";".join(f"{e.name}:{e.offset}:{e.shape}:{e.dtype}" for e in entries)
    return hashlib.sha256(text.encode()).hexdigest()
