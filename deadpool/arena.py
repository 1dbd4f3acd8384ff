"""Snapshot memory: owned by the guardian, written by its trainer, sent to the neighbour.

One anonymous file (memfd) per slot, mapped by both processes, with two buffers. A buffer is a
header page, then the payload: metadata (JSON) and tensors, the same layout in every iteration.
A buffer is valid when its header names an iteration; the trainer takes the name away before it
writes and puts it back after, so that a crash in between leaves no half snapshot. A header with a
flipped bit names nothing.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import struct

from deadpool.integrity import Manifest, checksum
from deadpool.protocol.snapshots import NUM_BUFFERS
from deadpool.protocol.types import Iteration, Slot

HEADER_BYTES = 4096
"""A page: payloads stay page-aligned, as pinning wants it."""

METADATA_BYTES = 1 << 18
"""Of a payload's start: room for its JSON part, of which the first 8 bytes are the length."""

ALIGNMENT = 64
"""Bytes; every tensor of a payload starts at a multiple."""

_HEADER = struct.Struct("<8sqq")
"""Magic, slot, iteration; the checksum of these follows."""
_HEADER_SUM = struct.Struct("<Q")
_MAGIC = b"DEADPOOL"
_INVALID = -1


class MappedFile(mmap.mmap):
    """A memfd's mapping that knows its descriptor, so that another process can be given it."""

    descriptor: int

    @classmethod
    def of(cls, descriptor: int, num_bytes: int) -> MappedFile:
        mapped = cls(descriptor, num_bytes)
        mapped.descriptor = descriptor
        return mapped


def locate(view: memoryview) -> tuple[int, int]:
    """Descriptor, and offset in its file, of a view that is not empty, of memory of this module
    that has not been closed."""
    mapped = view.obj
    assert isinstance(mapped, MappedFile), type(mapped)
    start = ctypes.addressof(ctypes.c_char.from_buffer(view))
    return mapped.descriptor, start - ctypes.addressof(ctypes.c_char.from_buffer(mapped))


class Arena:
    """Both ends of the shared memory of one slot.

    descriptor: of the memfd, made by the guardian before it forks the trainer.
    """

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self.payload_bytes = 0
        self._map: MappedFile | None = None

    @classmethod
    def create(cls) -> Arena:
        """An empty arena; it gets its size by `resize` once the optimizer is known."""
        return cls(os.memfd_create("deadpool-snapshot", os.MFD_CLOEXEC))

    def resize(self, payload_bytes: int) -> None:
        """Trainer: give the memory its size; what a trainer before this one left in it stays.
        Raises OSError when the machine has no room."""
        num_bytes = NUM_BUFFERS * buffer_bytes(payload_bytes)
        if os.fstat(self.descriptor).st_size == num_bytes:
            self.attach(payload_bytes)
            return
        os.posix_fallocate(self.descriptor, 0, num_bytes)
        self.attach(payload_bytes)
        for buffer in range(NUM_BUFFERS):
            self.invalidate(buffer)

    def attach(self, payload_bytes: int) -> None:
        """Guardian: map memory that the trainer has sized."""
        if self._map is not None and payload_bytes == self.payload_bytes:
            return
        self.payload_bytes = payload_bytes
        self._map = MappedFile.of(self.descriptor, NUM_BUFFERS * buffer_bytes(payload_bytes))

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
        """What a buffer holds; None while it is invalid, and where its header is damaged."""
        header = self.header(buffer)
        _, _, iteration = _HEADER.unpack_from(header)
        if iteration < 0 or not self.has_good_header(buffer):
            return None
        return Iteration(iteration)

    def header(self, buffer: int) -> memoryview:
        """[HEADER_BYTES] uint8, writable."""
        assert self._map is not None
        start = buffer * buffer_bytes(self.payload_bytes)
        return memoryview(self._map)[start : start + HEADER_BYTES]

    def has_good_header(self, buffer: int) -> bool:
        """Whether the header is as it was written, whatever it says."""
        header = self.header(buffer)
        (kept,) = _HEADER_SUM.unpack_from(header, _HEADER.size)
        return bytes(header[:8]) == _MAGIC and checksum(header[: _HEADER.size]) == kept

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
        packed = _HEADER.pack(_MAGIC, slot, iteration)
        packed += _HEADER_SUM.pack(checksum(memoryview(packed)))
        # At once: the other process may look while it is written.
        self.header(buffer)[: len(packed)] = packed


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
        self.manifest: Manifest | None = None
        """Of the bytes as they came in; None while they do."""
        self._map = MappedFile.of(descriptor, max(num_bytes, 1))

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
        """[num_bytes] uint8 to receive into; its content and checksums count as lost. Allocated
        where it is new or has another size. Raises OSError where there is no room for it."""
        replica = self._replicas.get((slot, buffer))
        if replica is None or replica.num_bytes != num_bytes:
            if replica is not None:
                # Freed first: two of a size that fits once would not fit.
                self._replicas.pop((slot, buffer)).close()
            replica = self._replicas[slot, buffer] = Replica.allocate(num_bytes)
        replica.manifest = None
        return replica.view

    def seal(self, slot: Slot, buffer: int, manifest: Manifest) -> None:
        """The bytes are all there."""
        self._replicas[slot, buffer].manifest = manifest

    def view(self, slot: Slot, buffer: int) -> memoryview:
        """[num_bytes] uint8. Raises KeyError where nothing ever came in."""
        return self._replicas[slot, buffer].view

    def holds(self, slot: Slot, buffer: int, manifest: Manifest) -> bool:
        """Whether the buffer still holds this very replica."""
        replica = self._replicas.get((slot, buffer))
        return replica is not None and replica.manifest is manifest

    def descriptor(self, slot: Slot, buffer: int) -> int:
        """Of the memory, for another process to map. It is closed when a replica of another size
        takes the buffer. Raises KeyError where nothing ever came in."""
        return self._replicas[slot, buffer].descriptor

    def manifest(self, slot: Slot, buffer: int) -> Manifest:
        """Of the bytes as they came in. Raises KeyError where they have not, or not all."""
        manifest = self._replicas[slot, buffer].manifest
        if manifest is None:
            raise KeyError((slot, buffer))
        return manifest

    def find(self, slot: Slot, iteration: Iteration) -> tuple[Manifest, memoryview] | None:
        """Of the whole replica of `iteration`, [num_bytes] uint8."""
        for (each, _), replica in self._replicas.items():
            manifest = replica.manifest
            if each == slot and manifest is not None and manifest.iteration == iteration:
                return manifest, replica.view
        return None

    def drop(self, slot: Slot, buffer: int) -> None:
        """The buffer's next bytes go to fresh memory: something may still write to this."""
        replica = self._replicas.pop((slot, buffer), None)
        if replica is not None:
            replica.close()

    def close(self) -> None:
        """Give all memory back."""
        while self._replicas:
            self._replicas.popitem()[1].close()

    @property
    def num_bytes(self) -> int:
        return sum(replica.num_bytes for replica in self._replicas.values())
