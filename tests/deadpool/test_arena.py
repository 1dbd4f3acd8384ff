"""Snapshot memory and the shelf of replicas."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deadpool.arena import HEADER_BYTES, Arena, Replica, ReplicaShelf
from deadpool.integrity import Manifest, checksum
from deadpool.protocol.snapshots import NUM_BUFFERS
from deadpool.protocol.types import Iteration, Slot

SLOT = Slot(2)


@pytest.fixture
def arenas() -> Iterator[tuple[Arena, Arena]]:
    """The trainer's end and the guardian's, of the same memory."""
    trainer = Arena.create()
    guardian = Arena(os.dup(trainer.descriptor))
    yield trainer, guardian
    os.close(trainer.descriptor)
    os.close(guardian.descriptor)


def test_arena_before_its_size_is_known_holds_nothing() -> None:
    arena = Arena.create()
    try:
        assert not arena.is_attached
        assert arena.iterations() == frozenset() and arena.find(Iteration(0)) is None
        arena.invalidate_after(Iteration(0))
    finally:
        os.close(arena.descriptor)


def test_arena_resized_starts_with_no_valid_buffer(arenas: tuple[Arena, Arena]) -> None:
    trainer, guardian = arenas
    trainer.resize(5000)
    guardian.attach(5000)
    assert guardian.iterations() == frozenset()
    assert [guardian.iteration(buffer) for buffer in range(NUM_BUFFERS)] == [None, None]


def test_arena_written_by_the_trainer_is_read_by_the_guardian(arenas: tuple[Arena, Arena]) -> None:
    trainer, guardian = arenas
    trainer.resize(5000)
    guardian.attach(5000)
    for buffer, fill in ((0, b"a"), (1, b"b")):
        trainer.payload(buffer)[:] = fill * 5000
        trainer.label(buffer, SLOT, Iteration(7 + buffer))
    assert guardian.iterations() == {7, 8}
    assert (guardian.find(Iteration(7)), guardian.find(Iteration(8))) == (0, 1)
    assert guardian.find(Iteration(9)) is None
    assert bytes(guardian.payload(0)) == b"a" * 5000
    assert bytes(guardian.payload(1)) == b"b" * 5000


@pytest.mark.parametrize("size", [1, HEADER_BYTES, HEADER_BYTES + 1, 123_457])
def test_arena_buffers_of_any_size_are_page_aligned_and_do_not_overlap(
    arenas: tuple[Arena, Arena], size: int
) -> None:
    trainer, _ = arenas
    trainer.resize(size)
    trainer.label(0, SLOT, Iteration(1))
    trainer.label(1, SLOT, Iteration(2))
    trainer.payload(0)[:] = b"\xff" * size
    trainer.payload(1)[:] = b"\xee" * size
    assert len(trainer.payload(0)) == len(trainer.payload(1)) == size
    assert trainer.iterations() == {1, 2}
    assert bytes(trainer.payload(0)) == b"\xff" * size
    content = os.pread(trainer.descriptor, 1 << 20, 0)
    assert content.index(b"\xff" * min(size, 64)) % HEADER_BYTES == 0
    assert content.index(b"\xee" * min(size, 64)) % HEADER_BYTES == 0


def test_arena_write_cut_short_leaves_the_buffer_invalid(arenas: tuple[Arena, Arena]) -> None:
    trainer, guardian = arenas
    trainer.resize(100)
    guardian.attach(100)
    trainer.label(0, SLOT, Iteration(1))
    trainer.label(1, SLOT, Iteration(2))
    trainer.invalidate(0)
    trainer.payload(0)[:50] = b"x" * 50  # The trainer dies here.
    assert guardian.iterations() == {2}


def test_arena_invalidate_after_forgets_only_newer(arenas: tuple[Arena, Arena]) -> None:
    trainer, guardian = arenas
    trainer.resize(100)
    guardian.attach(100)
    trainer.label(0, SLOT, Iteration(4))
    trainer.label(1, SLOT, Iteration(5))
    guardian.invalidate_after(Iteration(5))
    assert trainer.iterations() == {4, 5}
    guardian.invalidate_after(Iteration(4))
    assert trainer.iterations() == {4}


def test_arena_iteration_zero_is_an_iteration(arenas: tuple[Arena, Arena]) -> None:
    trainer, _ = arenas
    trainer.resize(100)
    trainer.label(1, SLOT, Iteration(0))
    assert trainer.iterations() == {0} and trainer.find(Iteration(0)) == 1


@pytest.mark.parametrize("byte", range(32))
def test_arena_header_with_a_flipped_bit_names_nothing(
    arenas: tuple[Arena, Arena], byte: int
) -> None:
    trainer, guardian = arenas
    trainer.resize(100)
    guardian.attach(100)
    for bit in range(8):
        trainer.label(0, SLOT, Iteration(4))
        trainer.label(1, SLOT, Iteration(5))
        trainer.header(1)[byte] ^= 1 << bit
        assert guardian.iterations() == {4} and guardian.find(Iteration(5)) is None
        assert guardian.has_good_header(0) and not guardian.has_good_header(1)
        guardian.invalidate(1)
        assert guardian.has_good_header(1) and guardian.iterations() == {4}


@given(st.binary(min_size=1, max_size=200), st.data())
def test_checksum_changes_with_any_flipped_bit(content: bytes, data: st.DataObject) -> None:
    bit = data.draw(st.integers(0, len(content) * 8 - 1))
    flipped = bytearray(content)
    flipped[bit // 8] ^= 1 << bit % 8
    assert checksum(memoryview(content)) != checksum(memoryview(flipped))


# The shelf


def test_shelf_memory_keeps_its_place_while_the_size_stays() -> None:
    shelf = ReplicaShelf()
    shelf.memory(SLOT, 0, 100)[:] = b"a" * 100
    shelf.memory(SLOT, 1, 100)[:] = b"b" * 100
    assert bytes(shelf.memory(SLOT, 0, 100)) == b"a" * 100
    assert bytes(shelf.view(SLOT, 1)) == b"b" * 100
    assert shelf.num_bytes == 200


def test_shelf_memory_of_another_size_is_fresh_and_leaves_other_buffers() -> None:
    shelf = ReplicaShelf()
    old = shelf.memory(SLOT, 0, 100)
    old[:] = b"a" * 100
    shelf.memory(Slot(1), 0, 100)[:] = b"b" * 100
    assert bytes(shelf.memory(SLOT, 0, 50)) == bytes(50)
    assert len(shelf.view(SLOT, 0)) == 50 and bytes(shelf.view(Slot(1), 0)) == b"b" * 100
    assert bytes(old) == b"a" * 100  # Somebody may still be sending it.
    assert shelf.num_bytes == 150


def test_shelf_manifest_is_known_from_seal_until_the_memory_is_asked_for_again() -> None:
    shelf = ReplicaShelf()
    with pytest.raises(KeyError):
        shelf.manifest(SLOT, 0)
    shelf.memory(SLOT, 0, 100)
    with pytest.raises(KeyError):
        shelf.manifest(SLOT, 0)
    manifest = Manifest.of(slot=SLOT, iteration=Iteration(1), num_bytes=100, sums=[1 << 63])
    shelf.seal(SLOT, 0, manifest)
    assert shelf.manifest(SLOT, 0) == manifest and shelf.holds(SLOT, 0, manifest)
    shelf.memory(SLOT, 0, 100)
    assert not shelf.holds(SLOT, 0, manifest)
    with pytest.raises(KeyError):
        shelf.manifest(SLOT, 0)


def test_shelf_memory_is_mapped_by_another_process_of_the_machine() -> None:
    shelf = ReplicaShelf()
    shelf.memory(SLOT, 0, 5000)[:] = b"a" * 5000
    descriptor = shelf.descriptor(SLOT, 0)
    child = os.fork()
    if child == 0:
        theirs = mmap.mmap(descriptor, 5000)
        right = theirs[:] == b"a" * 5000
        theirs[4999:] = b"z"
        os._exit(0 if right else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert bytes(shelf.view(SLOT, 0)) == b"a" * 4999 + b"z"
    assert shelf.memory(SLOT, 0, 5000) is not None
    assert shelf.descriptor(SLOT, 0) == descriptor  # The same memory, as often as it is filled.


def test_replica_closed_or_dropped_gives_descriptor_and_memory_back() -> None:
    before = len(os.listdir("/proc/self/fd"))
    replica = Replica.allocate(1 << 20)
    view = replica.view
    replica.close()
    replica.close()
    view[0] = 1  # Somebody still sends it.
    del view, replica
    dropped: Replica | None = Replica.allocate(5)
    assert len(os.listdir("/proc/self/fd")) > before
    del dropped
    shelf = ReplicaShelf()
    for size in (10, 20, 30):
        shelf.memory(SLOT, 0, size)
    shelf.close()
    assert len(os.listdir("/proc/self/fd")) == before


def test_replica_takes_room_once_it_is_written() -> None:
    replica = Replica.allocate(8 << 20)
    replica.view[0] = 1
    assert os.fstat(replica.descriptor).st_blocks * 512 < 1 << 20 or _has_huge_pages()


def _has_huge_pages() -> bool:
    text = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled").read_text()
    return "[never]" not in text


@pytest.mark.parametrize("num_bytes", [-1, 1 << 62, 1 << 70])
def test_shelf_memory_that_cannot_be_had_raises_os_error_and_leaves_nothing(num_bytes: int) -> None:
    shelf = ReplicaShelf()
    shelf.memory(SLOT, 0, 100)
    with pytest.raises(OSError):
        shelf.memory(SLOT, 0, num_bytes)
    assert shelf.num_bytes == 0
    assert len(shelf.memory(SLOT, 0, 0)) == 0
