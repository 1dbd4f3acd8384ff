"""Capture of a rank's state into the arena, and its restoration.

A snapshot is what training after iteration i depends on and no peer has: the optimizer shard,
module buffers, random-number states, counters. Parameters are not in it: they follow from the main
parameters (`deadpool.optimizer.rebuild_parameters`).
"""

from __future__ import annotations

import ctypes
import dataclasses
import hashlib
import json
import math
import os
import queue
import threading
import time
from collections.abc import Callable
from typing import Any

import torch

from deadpool.arena import ALIGNMENT, METADATA_BYTES, Arena
from deadpool.optimizer import initialize_state, load_scalar_state, scalar_state, shard_tensors
from deadpool.protocol.snapshots import NUM_BUFFERS, capture_buffer
from deadpool.protocol.types import Iteration, Slot

_PIECE_BYTES = 4 << 20
_CAPTURE_NICENESS = 10
_COPY_TIMEOUT_S = 120.0


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
    entries, offset = [], METADATA_BYTES
    for name, tensor in tensors.items():
        entry = Entry(name=name, offset=offset, shape=tuple(tensor.shape), dtype=tensor.dtype)
        entries.append(entry)
        offset += -(-entry.num_bytes // ALIGNMENT) * ALIGNMENT
    return entries, offset


class SnapshotDamaged(Exception):
    """A snapshot does not belong to the model that was built here."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Rest:
    """What a snapshot has beside the tensors of model and optimizer, which go on changing."""

    iteration: Iteration
    random: dict[str, torch.Tensor]
    metadata: bytes


class _Capture:
    """One snapshot on its way into the arena."""

    def __init__(self, iteration: Iteration, buffer: int) -> None:
        self.iteration = iteration
        self.buffer = buffer
        self.started = time.monotonic()
        self.on_device: Any = None
        """The event behind the copies, on a device's side stream."""
        self.is_copied = threading.Event()
        """The live tensors are no longer read."""
        self.is_decided = threading.Event()
        """Sealed, or never to be: its iteration has failed."""
        self.is_sealed = False
        """The rest of the snapshot lies beside the tensors."""
        self.is_over = threading.Event()
        """Labelled, or given up."""
        self.seconds = 0.0
        self.error: BaseException | None = None


class Snapshotter:
    """The trainer's side of one slot's arena: main thread, but for its capture thread, which
    copies what the optimizer owns (or waits until the device has) and labels the buffer.

    What the optimizer owns rests until its next step, so its copy runs beside the next forward and
    backward pass; everything else is small and is copied at once. collect_random, restore_random:
    the driver's random-number states, a flat dict of CPU tensors of fixed shapes.
    on_captured(iteration, buffer): the buffer is whole; called by the capture thread.
    on_halfway(iteration): half of the tensors are copied (fault injection).
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
        self._num_owned = len(self._live)
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
        self._capture: _Capture | None = None
        """The newest one."""
        self._queue: queue.Queue[_Capture | None] = queue.Queue()
        self._rest: Rest | None = None
        """Of the last snapshot sealed or loaded."""
        if self._on_device:
            self._pin()
            self._stream = torch.cuda.Stream()
        self._thread = threading.Thread(
            target=self._run_captures, name="deadpool-capture", daemon=True
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
        """Begin to copy the state after `iteration`. Before anything overwrites what the
        optimizer owns, `wait_copied` must have returned; before the next capture, this one must
        be sealed and committed.
        """
        self._give_up_unsealed()
        capture = self._capture = _Capture(iteration, capture_buffer(self._arena.held()))
        self._arena.invalidate(capture.buffer)
        names = list(self._live)
        # In the order of compute, which overwrites them: a forward pass may.
        self._copy(capture, names[self._num_owned :])
        if self._on_device:
            self._stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._stream):
                middle = self._num_owned // 2
                self._copy(capture, names[:middle])
                self._on_halfway(iteration)
                self._copy(capture, names[middle : self._num_owned])
                capture.on_device = torch.cuda.Event()
                capture.on_device.record()
        self._queue.put(capture)

    def _copy(self, capture: _Capture, names: list[str]) -> None:
        """On a device: into the current stream."""
        views = self._views[capture.buffer]
        with torch.no_grad():
            for name in names:
                views[name].copy_(self._live[name], non_blocking=True)

    def seal(self, iteration: Iteration, metadata: dict[str, Any]) -> None:
        """Add the random-number states and counters of the same iteration; the snapshot is
        labelled as soon as the tensors are copied, too."""
        capture = self._capture
        assert capture is not None and capture.iteration == iteration
        self._rest = Rest(
            iteration=iteration,
            random={name: value.clone() for name, value in self._collect_random().items()},
            metadata=self._encode({**metadata, "optimizer": scalar_state(self._optimizer)}),
        )
        self._write_rest(capture.buffer, self._rest)
        capture.is_sealed = True
        capture.is_decided.set()

    def _give_up_unsealed(self) -> None:
        if self._capture is not None:
            self._capture.is_decided.set()

    @property
    def sealed(self) -> Iteration | None:
        """Of which the state beside the live tensors is at hand: see `retake`."""
        return self._rest.iteration if self._rest is not None else None

    def retake(self) -> None:
        """Take the snapshot of `sealed` again, bit for bit, of live tensors that are still its;
        the one in the arena is damaged. No capture is under way; nobody is told."""
        rest = self._rest
        assert rest is not None
        buffer = capture_buffer(self._arena.held())
        self._arena.invalidate(buffer)
        torch.frombuffer(self._arena.payload(buffer), dtype=torch.uint8).zero_()  # Gaps, too.
        with torch.no_grad():
            for name, tensor in self._live.items():
                self._views[buffer][name].copy_(tensor)
        self._write_rest(buffer, rest)
        self._arena.label(buffer, self._slot, rest.iteration)

    def _run_captures(self) -> None:
        """The capture thread."""
        if not self._on_device:
            # Compute goes first; whoever waits for the copy leaves it the core.
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _CAPTURE_NICENESS)
        while (capture := self._queue.get()) is not None:
            try:
                if self._on_device:
                    capture.on_device.synchronize()
                else:
                    self._copy_owned(capture)
            except BaseException as error:
                capture.error = error
            capture.seconds = time.monotonic() - capture.started
            capture.is_copied.set()
            capture.is_decided.wait()
            if capture.is_sealed and capture.error is None:
                self._arena.label(capture.buffer, self._slot, capture.iteration)
                self._on_captured(capture.iteration, capture.buffer)
            capture.is_over.set()

    def _copy_owned(self, capture: _Capture) -> None:
        """Piece by piece, without the interpreter lock, in the order in which the optimizer's
        step will overwrite them."""
        views = self._views[capture.buffer]
        for index, name in enumerate(list(self._live)[: self._num_owned]):
            if index == self._num_owned // 2:
                self._on_halfway(capture.iteration)
            source, target = self._live[name], views[name]
            if not source.is_contiguous():
                target.copy_(source)
                continue
            num_bytes = source.numel() * source.element_size()
            for start in range(0, num_bytes, _PIECE_BYTES):
                ctypes.memmove(
                    target.data_ptr() + start,
                    source.data_ptr() + start,
                    min(_PIECE_BYTES, num_bytes - start),
                )

    def wait_copied(self) -> None:
        """Until the last capture no longer reads the live tensors. Raises RuntimeError where it
        has failed, or does not come to an end."""
        capture = self._capture
        if capture is None:
            return
        if not capture.is_copied.wait(_COPY_TIMEOUT_S):
            raise RuntimeError(f"iteration {capture.iteration} is still being copied")
        if capture.error is not None:
            raise RuntimeError(f"iteration {capture.iteration} was not captured") from capture.error

    def settle(self) -> None:
        """Until the last capture is labelled and told, or given up. A failed one counts for
        nothing: its buffer stays invalid. Raises RuntimeError where it does not come to an end."""
        self._give_up_unsealed()
        if self._capture is not None and not self._capture.is_over.wait(_COPY_TIMEOUT_S):
            raise RuntimeError(f"iteration {self._capture.iteration} is still being copied")
        if self._capture is not None and self._capture.error is not None:
            self._capture = None

    def capture_seconds(self, iteration: Iteration) -> float:
        """How long the copy of the newest capture took; 0 for another iteration."""
        capture = self._capture
        return capture.seconds if capture is not None and capture.iteration == iteration else 0.0

    def close(self) -> None:
        self._give_up_unsealed()
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

        Raises SnapshotDamaged where the snapshot is of another layout, or cannot be read.
        """
        body = self._read_metadata(buffer)
        try:
            metadata: dict[str, Any] = json.loads(body)
        except ValueError as error:
            reason = f"the metadata of slot {self._slot}'s snapshot cannot be read: {error}"
            raise SnapshotDamaged(reason) from error
        if metadata.pop("digest") != self._digest:
            raise SnapshotDamaged(
                f"the snapshot of slot {self._slot} was taken of another model layout"
            )
        random_names = [e.name for e in self._entries if e.name.startswith("random/")]
        random = {
            name.removeprefix("random/"): self._views[buffer][name].clone() for name in random_names
        }
        self._restore_random(random)
        iteration = self._arena.iteration(buffer)
        if iteration is not None:
            self._rest = Rest(iteration=iteration, random=random, metadata=body)
        load_scalar_state(self._optimizer, metadata.pop("optimizer"))
        return metadata

    def _encode(self, metadata: dict[str, Any]) -> bytes:
        body = json.dumps({**metadata, "digest": self._digest}).encode()
        if len(body) > METADATA_BYTES - 8:
            raise RuntimeError(f"snapshot metadata of {len(body)} bytes, room is for 256 KiB")
        return body

    def _write_rest(self, buffer: int, rest: Rest) -> None:
        for name, value in rest.random.items():
            self._views[buffer][f"random/{name}"].copy_(value)
        payload = self._arena.payload(buffer)
        head = len(rest.metadata).to_bytes(8, "little") + rest.metadata
        # What an older one left behind it is part of the bytes, and of their checksums.
        payload[:METADATA_BYTES] = head.ljust(METADATA_BYTES, b"\0")

    def _read_metadata(self, buffer: int) -> bytes:
        payload = self._arena.payload(buffer)
        length = int.from_bytes(payload[:8], "little")
        return bytes(payload[8 : 8 + min(length, METADATA_BYTES - 8)])


def _digest(entries: list[Entry]) -> str:
    text = ";".join(f"{e.name}:{e.offset}:{e.shape}:{e.dtype}" for e in entries)
    return hashlib.sha256(text.encode()).hexdigest()
