"""Snapshot memory and the shelf of replicas."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deadpool.arena import HEADER_BYTES, NUM_BUFFERS, Arena, ReplicaShelf, checksum
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


@given(st.binary(min_size=1, max_size=200), st.data())
def test_checksum_changes_with_any_flipped_bit(content: bytes, data: st.DataObject) -> None:
    bit = data.draw(st.integers(0, len(content) * 8 - 1))
    flipped = bytearray(content)
    flipped[bit // 8] ^= 1 << bit % 8
    assert checksum(memoryview(content)) != checksum(memoryview(flipped))


# The shelf


def keep(shelf: ReplicaShelf, slot: int, iteration: int, num_bytes: int = 100) -> None:
    replica = shelf.open_buffer(Slot(slot), num_bytes)
    replica.view[:] = bytes([iteration]) * num_bytes
    replica.iteration = Iteration(iteration)


def test_shelf_opened_buffer_counts_only_once_it_is_labelled() -> None:
    shelf = ReplicaShelf()
    replica = shelf.open_buffer(SLOT, 100)
    assert shelf.holdings() == frozenset()
    replica.iteration = Iteration(1)
    assert shelf.holdings() == {(SLOT, 1)}


def test_shelf_opening_a_third_buffer_gives_up_the_oldest() -> None:
    shelf = ReplicaShelf()
    keep(shelf, 2, 8)
    keep(shelf, 2, 7)
    shelf.open_buffer(SLOT, 100)
    assert shelf.holdings() == {(SLOT, 8)}


def test_shelf_opening_again_takes_the_invalid_buffer_and_keeps_the_newest() -> None:
    shelf = ReplicaShelf()
    keep(shelf, 2, 7)
    keep(shelf, 2, 8)
    for _ in range(3):
        shelf.open_buffer(SLOT, 100)
    assert shelf.holdings() == {(SLOT, 8)}


def test_shelf_invalidate_after_forgets_newer_of_every_slot() -> None:
    shelf = ReplicaShelf()
    for slot in (1, 2):
        keep(shelf, slot, 7)
        keep(shelf, slot, 8)
    shelf.invalidate_after(Iteration(7))
    assert shelf.holdings() == {(1, 7), (2, 7)}


def test_shelf_of_another_size_starts_afresh() -> None:
    shelf = ReplicaShelf()
    keep(shelf, 2, 7)
    keep(shelf, 2, 8, num_bytes=50)
    assert shelf.holdings() == {(SLOT, 8)} and shelf.num_bytes == 50


@given(st.lists(st.integers(0, 9), min_size=1, max_size=30))
def test_shelf_whatever_comes_keeps_two_buffers_and_the_last_put(iterations: list[int]) -> None:
    shelf = ReplicaShelf()
    for iteration in iterations:
        held = {i for _, i in shelf.holdings()}
        if iteration in held:
            continue
        keep(shelf, 2, iteration)
        now = {i for _, i in shelf.holdings()}
        assert iteration in now and len(now) <= NUM_BUFFERS and now <= held | {iteration}
        if held:
            assert max(held) in now
        for i in now:
            found = shelf.find(SLOT, Iteration(i))
            assert found is not None and bytes(found.view) == bytes([i]) * 100
    assert shelf.num_bytes <= NUM_BUFFERS * 100
