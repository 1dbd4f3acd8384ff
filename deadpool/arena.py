"""Snapshot memory: owned by the guardian, written by its trainer, sent to the neighbour.

One anonymous file (memfd) per slot, mapped by both processes, with two buffers. A buffer is a
header page, then the payload: metadata (JSON) and tensors, the same layout in every iteration.
A buffer is valid when its header names an iteration; the trainer takes the name away before it
writes and puts it back after, so that a crash in between leaves no half snapshot.
"""

from __future__ import annotations

import dataclasses
import mmap
import os
import struct

import xxhash

from deadpool.protocol.snapshots import NUM_BUFFERS
from deadpool.protocol.types import Iteration, Slot

HEADER_BYTES = 4096
"""A page: payloads stay page-aligned, as pinning wants it."""

_HEADER = struct.Struct("<8sqq")
_MAGIC = b"DEADPOOL"
_INVALID = -1


def checksum(view: memoryview) -> int:
    """XXH3, 64 bits. Run it off the event loop."""
    return xxhash.xxh3_64_intdigest(view)


class Arena:
    """Both ends of the shared memory of one slot.

    descriptor: of the memfd, made by the guardian before it forks the trainer.
    """

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self.payload_bytes = 0
        self._map: mmap.mmap | None = None

    @classmethod
    def create(cls) -> Arena:
        """An empty arena; it gets its size by `resize` once the optimizer is known."""
        return cls(os.memfd_create("deadpool-snapshot", os.MFD_CLOEXEC))

    def resize(self, payload_bytes: int) -> None:
        """Trainer: give the memory its size. Raises OSError when the machine has no room."""
        os.posix_fallocate(self.descriptor, 0, NUM_BUFFERS * _buffer_bytes(payload_bytes))
        self.attach(payload_bytes)
        for buffer in range(NUM_BUFFERS):
            self.invalidate(buffer)

    def attach(self, payload_bytes: int) -> None:
        """Guardian: map memory that the trainer has sized."""
        self.payload_bytes = payload_bytes
        self._map = mmap.mmap(self.descriptor, NUM_BUFFERS * _buffer_bytes(payload_bytes))

    @property
    def is_attached(self) -> bool:
        return self._map is not None

    def payload(self, buffer: int) -> memoryview:
        """The payload of a buffer, [payload_bytes] uint8, writable."""
        assert self._map is not None
        start = buffer * _buffer_bytes(self.payload_bytes) + HEADER_BYTES
        return memoryview(self._map)[start : start + self.payload_bytes]

    def label(self, buffer: int, slot: Slot, iteration: Iteration) -> None:
        """The buffer is whole: it holds this iteration of this slot."""
        self._write_header(buffer, slot, iteration)

    def invalidate(self, buffer: int) -> None:
        self._write_header(buffer, Slot(_INVALID), Iteration(_INVALID))

    def iteration(self, buffer: int) -> Iteration | None:
        """What a buffer holds; None while it is invalid."""
        assert self._map is not None
        start = buffer * _buffer_bytes(self.payload_bytes)
        magic, _, iteration = _HEADER.unpack_from(self._map, start)
        return Iteration(iteration) if magic == _MAGIC and iteration >= 0 else None

    def find(self, iteration: Iteration) -> int | None:
        """The buffer that holds `iteration`."""
        if self._map is None:
            return None
        return next((b for b in range(NUM_BUFFERS) if self.iteration(b) == iteration), None)

    def iterations(self) -> frozenset[Iteration]:
        if self._map is None:
            return frozenset()
        held = (self.iteration(buffer) for buffer in range(NUM_BUFFERS))
        return frozenset(i for i in held if i is not None)

    def invalidate_after(self, iteration: Iteration) -> None:
        """Forget what lies on a timeline that the job has left."""
        for buffer in range(NUM_BUFFERS if self._map is not None else 0):
            held = self.iteration(buffer)
            if held is not None and held > iteration:
                self.invalidate(buffer)

    def _write_header(self, buffer: int, slot: int, iteration: int) -> None:
        assert self._map is not None
        start = buffer * _buffer_bytes(self.payload_bytes)
        _HEADER.pack_into(self._map, start, _MAGIC, slot, iteration)


def _buffer_bytes(payload_bytes: int) -> int:
    return HEADER_BYTES + -(-payload_bytes // HEADER_BYTES) * HEADER_BYTES


@dataclasses.dataclass(slots=True, kw_only=True)
class Replica:
    """Memory for one snapshot of another node's slot."""

    memory: mmap.mmap
    num_bytes: int
    checksum: int | None = None
    """XXH3 of the bytes; None while they come in."""

    @classmethod
    def allocate(cls, num_bytes: int) -> Replica:
        """Page-aligned; pages take room once they are written. Raises OSError for what cannot be
        had."""
        if num_bytes < 0:
            raise OSError(f"{num_bytes} bytes")
        try:
            memory = mmap.mmap(-1, max(num_bytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except OverflowError as error:
            raise OSError(f"{num_bytes} bytes: {error}") from error
        return cls(memory=memory, num_bytes=num_bytes)

    @property
    def view(self) -> memoryview:
        """[num_bytes] uint8, writable."""
        return memoryview(self.memory)[: self.num_bytes]


class ReplicaShelf:
    """Memory for the replicas of other slots, by slot and buffer. What lies in it, and what may
    be overwritten, is decided elsewhere."""

    def __init__(self) -> None:
        self._replicas: dict[tuple[Slot, int], Replica] = {}

    def memory(self, slot: Slot, buffer: int, num_bytes: int) -> memoryview:
        """[num_bytes] uint8 to receive into; its content and checksum count as lost. Allocated
        where it is new or has another size. Raises OSError where there is no room for it."""
        replica = self._replicas.get((slot, buffer))
        if replica is None or replica.num_bytes != num_bytes:
            # Freed first: two of a size that fits once would not fit.
            replica = None
            self._replicas.pop((slot, buffer), None)
            replica = self._replicas[slot, buffer] = Replica.allocate(num_bytes)
        replica.checksum = None
        return replica.view

    def seal(self, slot: Slot, buffer: int, checksum: int) -> None:
        """The bytes are all there."""
        self._replicas[slot, buffer].checksum = checksum

    def view(self, slot: Slot, buffer: int) -> memoryview:
        """[num_bytes] uint8. Raises KeyError where nothing ever came in."""
        return self._replicas[slot, buffer].view

    def checksum(self, slot: Slot, buffer: int) -> int:
        """XXH3 of the bytes as they came in. Raises KeyError where they have not, or not all."""
        checksum = self._replicas[slot, buffer].checksum
        if checksum is None:
            raise KeyError((slot, buffer))
        return checksum

    @property
    def num_bytes(self) -> int:
        return sum(replica.num_bytes for replica in self._replicas.values())
