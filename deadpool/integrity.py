"""Checksums of snapshots and replicas: one a chunk, and a root over them and what they are of.

XXH3, 64 bits: against damage by memory, wires and our own mistakes, not against an enemy. A chunk
is summed as it comes in or just before it goes out, not in a pass of its own; xxhash releases the
interpreter lock for it.
"""

from __future__ import annotations

import asyncio
import dataclasses
import struct
from collections.abc import Iterator, Sequence

import xxhash

from deadpool.protocol.types import Iteration, Slot

CHUNK_BYTES = 16 << 20
"""The last chunk of a payload is what is left."""

_INLINE_BYTES = 256 << 10
"""What is summed faster (some 20 us) than an executor is asked."""

_ROOT = struct.Struct("<qqQQ")


def checksum(view: memoryview) -> int:
    """XXH3, 64 bits. About 0.1 s a GB: run more than a little off the event loop."""
    return xxhash.xxh3_64_intdigest(view)


def chunks(payload: memoryview) -> Iterator[memoryview]:
    """The pieces of a payload that are summed one by one, in order; none of nothing."""
    for start in range(0, len(payload), CHUNK_BYTES):
        yield payload[start : start + CHUNK_BYTES]


def begin_sum(chunk: memoryview) -> asyncio.Future[int]:
    """The chunk's checksum, computed in the loop's executor where it is worth it."""
    loop = asyncio.get_running_loop()
    if len(chunk) > _INLINE_BYTES:
        return loop.run_in_executor(None, checksum, chunk)
    done: asyncio.Future[int] = loop.create_future()
    done.set_result(checksum(chunk))
    return done


async def sum_chunks(payload: memoryview) -> tuple[int, ...]:
    """Checksums of memory that lies still, chunks in parallel."""
    return tuple(await asyncio.gather(*map(begin_sum, chunks(payload))))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """What a payload was when it was whole. Made by `of`."""

    slot: Slot
    iteration: Iteration
    num_bytes: int
    sums: tuple[int, ...]
    """Of `chunks`, in order."""
    root: int
    """Over all of the above. The epoch is not in it: a restored iteration stays what it was."""

    @classmethod
    def of(
        cls, *, slot: Slot, iteration: Iteration, num_bytes: int, sums: Sequence[int]
    ) -> Manifest:
        root = _root(slot, iteration, num_bytes, sums)
        return cls(slot=slot, iteration=iteration, num_bytes=num_bytes, sums=tuple(sums), root=root)

    def flaw(self, slot: Slot, iteration: Iteration, sums: Sequence[int]) -> str:
        """Why a payload with these sums is not the one of `iteration` of `slot` that this was made
        of; empty where it is. A manifest that was itself damaged fits nothing."""
        if self.root != _root(slot, iteration, self.num_bytes, self.sums):
            return f"its checksums themselves do not fit their root {self.root:#018x}"
        for index, (found, kept) in enumerate(zip(sums, self.sums, strict=True)):
            if found != kept:
                start = index * CHUNK_BYTES
                end = min(start + CHUNK_BYTES, self.num_bytes)
                return f"bytes {start} to {end} sum to {found:#018x}, were {kept:#018x}"
        return ""


def _root(slot: Slot, iteration: Iteration, num_bytes: int, sums: Sequence[int]) -> int:
    head = _ROOT.pack(slot, iteration, num_bytes, CHUNK_BYTES)
    return xxhash.xxh3_64_intdigest(head + struct.pack(f"<{len(sums)}Q", *sums))
