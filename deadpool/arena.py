"""Snapshot memory: owned by the guardian, written by its trainer, sent to the neighbour.

One anonymous file (memfd) per slot, mapped by both processes, with two buffers. A buffer is a
header page, then the payload: metadata (JSON) and tensors, the same layout in every iteration.
A buffer is valid when its header names an iteration; the trainer takes the name away before it
writes and puts it back after, so that a crash in between leaves no half snapshot.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import struct

import xxhash

from deadpool.protocol.snapshots import NUM_BUFFERS
from deadpool.protocol.types import Iteration, Slot

HEADER_BYTES = 4096
"""A page: payloads stay page-aligned, as pinning wants it."""

METADATA_BYTES = 1 << 18
"""Of a payload's start: room for its JSON part, of which the first 8 bytes are the length."""

ALIGNMENT = 64
"""Bytes; every tensor of a payload starts at a multiple."""

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
        os.posix_fallocate(self.descriptor, 0, NUM_BUFFERS * buffer_bytes(payload_bytes))
        self.attach(payload_bytes)
        for buffer in range(NUM_BUFFERS):
            self.invalidate(buffer)

    def attach(self, payload_bytes: int) -> None:
        """Guardian: map memory that the trainer has sized."""
        self.payload_bytes = payload_bytes
        self._map = mmap.mmap(self.descriptor, NUM_BUFFERS * buffer_bytes(payload_bytes))

    @property
    def is_attached(self) -> bool:
        return self._map is not None

    def payload(self, buffer: int) -> memoryview:
        """The payload of a buffer, [payload_bytes] uint8, writable."""
        assert self._map is not None
        start = buffer * buffer_bytes(self.payload_bytes) + HEADER_BYTES
        return memoryview(self._map)[start : start + self.payload_bytes]

    def label(self, buffer: int, slot: Slot, iteration: Iteration) -> None:
        """The buffer is whole: it holds this iteration of this slot."""
        self._write_header(buffer, slot, iteration)

    def invalidate(self, buffer: int) -> None:
        self._write_header(buffer, Slot(_INVALID), Iteration(_INVALID))

    def iteration(self, buffer: int) -> Iteration | None:
        """What a buffer holds; None while it is invalid."""
        assert self._map is not None
        start = buffer * buffer_bytes(self.payload_bytes)
        magic, _, iteration = _HEADER.unpack_from(self._map, start)
        return Iteration(iteration) if magic == _MAGIC and iteration >= 0 else None

    def held(self) -> list[Iteration | None]:
        """What each buffer holds."""
        return [self.iteration(buffer) for buffer in range(NUM_BUFFERS)]

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
        start = buffer * buffer_bytes(self.payload_bytes)
        _HEADER.pack_into(self._map, start, _MAGIC, slot, iteration)


def buffer_bytes(payload_bytes: int) -> int:
    """Of one buffer with its header, whole pages."""
    return HEADER_BYTES + -(-payload_bytes // HEADER_BYTES) * HEADER_BYTES


class Replica:
    """Memory for one snapshot of another node's slot: a memfd, which another process of this
    machine can map by its descriptor.

    Made by `allocate`. Freed by `close`, or once nobody refers to it.
    """

    def __init__(self, descriptor: int, num_bytes: int) -> None:
        self.descriptor = descriptor
        """Of `max(num_bytes, 1)` bytes; closed with the replica."""
        self.num_bytes = num_bytes
        self.checksum: int | None = None
        """XXH3 of the bytes; None while they come in."""
        self._map = mmap.mmap(descriptor, max(num_bytes, 1))

    @classmethod
    def allocate(cls, num_bytes: int) -> Replica:
        """Page-aligned; pages take room once they are written. Raises OSError for what cannot be
        had now: writing to a memfd beyond the machine's memory would kill somebody."""
        if num_bytes < 0:
            raise OSError(f"{num_bytes} bytes")
        available = available_bytes()
        if num_bytes > available:
            raise OSError(f"{num_bytes} bytes, {available} are available on this machine")
        descriptor = os.memfd_create("deadpool-replica", os.MFD_CLOEXEC)
        try:
            os.ftruncate(descriptor, max(num_bytes, 1))
            return cls(descriptor, num_bytes)
        except BaseException:
            os.close(descriptor)
            raise

    @property
    def view(self) -> memoryview:
        """[num_bytes] uint8, writable. It stays what it is after `close`."""
        return memoryview(self._map)[: self.num_bytes]

    def close(self) -> None:
        """Give the memory back, once the last view of it is gone. May be called again."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1
            with contextlib.suppress(BufferError):  # Somebody sends it; the view's end frees it.
                self._map.close()

    def __del__(self) -> None:
        if hasattr(self, "_map"):
            self.close()


def available_bytes() -> int:
    """Memory that processes may still take, as the kernel reckons. Raises OSError."""
    with open("/proc/meminfo") as lines:
        for line in lines:
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    raise OSError("/proc/meminfo has no MemAvailable")


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
            if replica is not None:
                # Freed first: two of a size that fits once would not fit.
                self._replicas.pop((slot, buffer)).close()
            replica = self._replicas[slot, buffer] = Replica.allocate(num_bytes)
        replica.checksum = None
        return replica.view

    def seal(self, slot: Slot, buffer: int, checksum: int) -> None:
        """The bytes are all there."""
        self._replicas[slot, buffer].checksum = checksum

    def view(self, slot: Slot, buffer: int) -> memoryview:
        """[num_bytes] uint8. Raises KeyError where nothing ever came in."""
        return self._replicas[slot, buffer].view

    def descriptor(self, slot: Slot, buffer: int) -> int:
        """Of the memory, for another process to map. It is closed when a replica of another size
        takes the buffer. Raises KeyError where nothing ever came in."""
        return self._replicas[slot, buffer].descriptor

    def checksum(self, slot: Slot, buffer: int) -> int:
        """XXH3 of the bytes as they came in. Raises KeyError where they have not, or not all."""
        checksum = self._replicas[slot, buffer].checksum
        if checksum is None:
            raise KeyError((slot, buffer))
        return checksum

    def close(self) -> None:
        """Give all memory back."""
        while self._replicas:
            self._replicas.popitem()[1].close()

    @property
    def num_bytes(self) -> int:
        return sum(replica.num_bytes for replica in self._replicas.values())
