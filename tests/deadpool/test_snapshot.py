"""Capture and load of a small model's state, in one process."""

from __future__ import annotations

import os
import threading
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from deadpool.arena import Arena
from deadpool.protocol.types import Iteration, Slot
from deadpool.snapshot import SnapshotDamaged, Snapshotter, lay_out

SLOT = Slot(3)
METADATA = {"state": {"iteration": 7, "loss": 0.1 + 0.2}, "scheduler": {"num_steps": 56}}


class Scaler:
    """A loss scaler as `DynamicGradScaler`: its state is a tensor and counters."""

    def __init__(self) -> None:
        self.scale, self.growth = torch.tensor([65536.0]), 3

    def state_dict(self) -> dict[str, Any]:
        return {"scale": self.scale, "growth_tracker": self.growth}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.scale, self.growth = state["scale"], state["growth_tracker"]


class Rank:
    """A model with a buffer, an Adam inside a leaf optimizer, and its arena."""

    def __init__(self, hidden: int = 5, seed: int = 1) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.model = torch.nn.Sequential(
            torch.nn.Linear(3, hidden), torch.nn.BatchNorm1d(hidden), torch.nn.Linear(hidden, 1)
        )
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator))
        self.adam = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.optimizer = types.SimpleNamespace(
            optimizer=self.adam, init_state_fn=None, config=None, grad_scaler=Scaler()
        )
        self.random = torch.Generator().manual_seed(seed)
        self.captured: list[tuple[int, int]] = []
        self.halfway: list[tuple[int, int]] = []
        self.halts = threading.Event()
        self.halts.set()
        """Cleared: captures stop halfway."""
        self.fails = False
        self.arena = Arena.create()
        self.snapshots = Snapshotter(
            arena=self.arena,
            slot=SLOT,
            model=[self.model],
            optimizer=self.optimizer,
            collect_random=lambda: {"torch": self.random.get_state()},
            restore_random=lambda state: self.random.set_state(state["torch"]) and None,
            on_captured=lambda iteration, buffer: self.captured.append((iteration, buffer)),
            on_halfway=self._on_halfway,
        )

    def _on_halfway(self, iteration: int) -> None:
        self.halfway.append((iteration, len(self.arena.iterations())))
        assert self.halts.wait(10)
        if self.fails:
            raise OSError("as if the copy had failed")

    def train(self, steps: int = 1) -> None:
        for _ in range(steps):
            inputs = torch.randn((8, 3), generator=self.random)
            self.adam.zero_grad()
            self.model(inputs).square().sum().backward()
            self.adam.step()
            self.adam.param_groups[0]["lr"] *= 0.9
            self.optimizer.grad_scaler.growth += 1
            self.optimizer.grad_scaler.scale *= 0.5

    def take(self, iteration: int) -> None:
        self.snapshots.capture_tensors(Iteration(iteration))
        self.snapshots.seal(Iteration(iteration), METADATA)
        self.snapshots.settle()

    def load(self, buffer: int) -> dict[str, Any]:
        self.snapshots.load_tensors(buffer)
        return self.snapshots.load_rest(buffer)

    def whole_state(self) -> list[bytes]:
        """Everything that the next step depends on, to the bit, read without `deadpool`."""
        tensors = [p.detach() for p in self.model.parameters()]
        tensors += list(self.model.buffers())
        for parameter in self.model.parameters():
            state = self.adam.state[parameter]
            tensors += [state["step"], state["exp_avg"], state["exp_avg_sq"]]
        tensors += [self.random.get_state(), self.optimizer.grad_scaler.scale]
        plain = [self.adam.param_groups[0]["lr"], self.optimizer.grad_scaler.growth]
        return [t.numpy().tobytes() for t in tensors] + [repr(v).encode() for v in plain]


@pytest.fixture
def make_rank() -> Iterator[Callable[..., Rank]]:
    made: list[Rank] = []

    def make(**sizes: int) -> Rank:
        made.append(Rank(**sizes))
        return made[-1]

    yield make
    for rank in made:
        rank.snapshots.close()
        os.close(rank.arena.descriptor)


def test_snapshot_loaded_gives_back_every_bit_and_the_same_continuation(
    make_rank: Callable[..., Rank],
) -> None:
    rank = make_rank()
    rank.train(2)
    rank.take(2)
    before = rank.whole_state()
    rank.train(3)
    continued = rank.whole_state()
    assert continued[0] != before[0]
    (buffer,) = [b for i, b in rank.captured if i == 2]
    assert rank.load(buffer) == METADATA
    assert rank.whole_state() == before
    rank.train(3)
    assert rank.whole_state() == continued


def test_snapshot_moved_as_bytes_restores_another_process_of_the_slot(
    make_rank: Callable[..., Rank],
) -> None:
    rank, replacement = make_rank(), make_rank(seed=2)
    rank.train(2)
    rank.take(2)
    (_, buffer) = rank.captured[0]
    assert replacement.snapshots.payload_bytes == rank.snapshots.payload_bytes
    replacement.arena.payload(0)[:] = rank.arena.payload(buffer)
    replacement.arena.label(0, SLOT, Iteration(2))
    assert replacement.load(0) == METADATA
    assert replacement.whole_state() == rank.whole_state()
    rank.train(2)
    replacement.train(2)
    assert replacement.whole_state() == rank.whole_state()


def test_snapshot_retaken_of_live_state_is_the_same_in_every_bit(
    make_rank: Callable[..., Rank],
) -> None:
    """Also of what goes on changing before the next step: random numbers and counters."""
    rank = make_rank()
    rank.train(2)
    for iteration in (1, 2, 3):  # The third has been written over a longer one.
        rank.snapshots.capture_tensors(Iteration(iteration))
        rank.snapshots.seal(Iteration(iteration), {**METADATA, "more": "x" * (99 // iteration)})
        rank.snapshots.settle()
    (buffer,) = [b for i, b in rank.captured if i == 3]
    before = bytes(rank.arena.payload(buffer))
    ends = (entry.offset + entry.num_bytes for entry in rank.snapshots._entries)
    gap = next(end for end in ends if end % 64)  # Written by nobody.
    for place in (3, 1 << 17, len(before) // 2, gap, len(before) - 1):
        rank.arena.payload(buffer)[place] ^= 1
    rank.arena.invalidate(buffer)
    torch.randn(8, generator=rank.random)
    rank.optimizer.grad_scaler.growth += 1
    assert rank.snapshots.sealed == 3
    rank.snapshots.retake()
    assert bytes(rank.arena.payload(buffer)) == before
    assert rank.arena.find(Iteration(3)) == buffer
    assert len(rank.captured) == 3  # Nobody is told.


def test_snapshot_loaded_can_be_retaken(make_rank: Callable[..., Rank]) -> None:
    rank = make_rank()
    rank.train(2)
    rank.take(6)
    before = bytes(rank.arena.payload(0))
    rank.train(1)
    rank.take(7)
    rank.load(0)
    assert rank.snapshots.sealed == 6
    rank.arena.payload(0)[1 << 18] ^= 1
    rank.arena.invalidate(0)
    rank.snapshots.retake()
    assert bytes(rank.arena.payload(0)) == before


def test_snapshot_whose_metadata_cannot_be_read_raises_damaged(
    make_rank: Callable[..., Rank],
) -> None:
    rank = make_rank()
    rank.take(6)
    rank.arena.payload(0)[8] ^= 1
    with pytest.raises(SnapshotDamaged, match="cannot be read"):
        rank.snapshots.load_rest(0)


def test_snapshot_before_the_first_step_restores_fresh_moments(
    make_rank: Callable[..., Rank],
) -> None:
    rank = make_rank()
    rank.take(0)
    before = rank.whole_state()
    rank.train(1)
    first_step = rank.whole_state()
    rank.load(rank.captured[0][1])
    assert rank.whole_state() == before
    rank.train(1)
    assert rank.whole_state() == first_step


def test_snapshot_of_another_layout_raises_damaged_naming_the_slot(
    make_rank: Callable[..., Rank],
) -> None:
    rank, other = make_rank(hidden=5), make_rank(hidden=6)
    rank.take(1)
    length = min(rank.snapshots.payload_bytes, other.snapshots.payload_bytes)
    other.arena.payload(0)[:length] = rank.arena.payload(rank.captured[0][1])[:length]
    with pytest.raises(SnapshotDamaged, match="slot 3"):
        other.snapshots.load_rest(0)


def test_snapshots_in_turn_alternate_between_the_buffers(make_rank: Callable[..., Rank]) -> None:
    rank = make_rank()
    for iteration in range(5):
        rank.take(iteration)
    assert [i for i, _ in rank.captured] == [0, 1, 2, 3, 4]
    buffers = [b for _, b in rank.captured]
    assert sorted(buffers[:2]) == [0, 1]
    assert buffers[2:] == [buffers[0], buffers[1], buffers[0]]
    assert rank.arena.iterations() == {3, 4}


def test_snapshot_after_a_load_keeps_the_loaded_one(make_rank: Callable[..., Rank]) -> None:
    """The restored iteration must stay until the next one is committed."""
    for loaded in (0, 1):
        rank = make_rank()
        rank.take(6)
        rank.take(7)
        buffer = next(b for i, b in rank.captured if i == 6 + loaded)
        rank.arena.invalidate_after(Iteration(6 + loaded))
        rank.load(buffer)
        rank.take(7 + loaded)
        assert {6 + loaded, 7 + loaded} == rank.arena.iterations()


def test_snapshot_is_not_valid_before_it_is_sealed(make_rank: Callable[..., Rank]) -> None:
    rank = make_rank()
    rank.take(1)
    rank.take(2)
    rank.snapshots.capture_tensors(Iteration(3))
    assert rank.arena.iterations() == {2} and len(rank.captured) == 2
    rank.snapshots.seal(Iteration(3), METADATA)
    rank.snapshots.settle()
    assert rank.arena.iterations() == {2, 3} and rank.captured[-1][0] == 3


def test_snapshot_never_sealed_is_given_up_and_the_next_takes_its_place(
    make_rank: Callable[..., Rank],
) -> None:
    rank = make_rank()
    rank.take(1)
    rank.take(2)
    rank.snapshots.capture_tensors(Iteration(3))
    rank.snapshots.settle()
    assert rank.arena.iterations() == {2}
    rank.take(4)
    assert rank.arena.iterations() == {2, 4}
    assert [iteration for iteration, _ in rank.captured] == [1, 2, 4]


def test_snapshot_under_way_holds_the_step_and_a_failed_one_says_so(
    make_rank: Callable[..., Rank],
) -> None:
    rank = make_rank()
    rank.halts.clear()
    rank.snapshots.capture_tensors(Iteration(1))
    waiter = threading.Thread(target=rank.snapshots.wait_copied)
    waiter.start()
    waiter.join(0.2)
    assert waiter.is_alive()
    rank.halts.set()
    waiter.join(10)
    assert not waiter.is_alive()
    rank.fails = True
    rank.snapshots.capture_tensors(Iteration(2))
    rank.snapshots.seal(Iteration(2), METADATA)
    with pytest.raises(RuntimeError, match="iteration 2 was not captured"):
        rank.snapshots.wait_copied()
    rank.snapshots.settle()
    assert rank.arena.iterations() == frozenset()


def test_snapshot_half_copied_is_not_valid(make_rank: Callable[..., Rank]) -> None:
    rank = make_rank()
    for iteration in (1, 2, 3):
        rank.take(iteration)
    # (iteration, number of valid snapshots at that moment)
    assert rank.halfway == [(1, 0), (2, 1), (3, 1)]


def test_snapshot_metadata_without_room_is_refused(make_rank: Callable[..., Rank]) -> None:
    rank = make_rank()
    rank.snapshots.capture_tensors(Iteration(1))
    with pytest.raises(RuntimeError, match="metadata"):
        rank.snapshots.seal(Iteration(1), {"state": "x" * (1 << 18)})
    assert rank.arena.iterations() == frozenset()


@given(
    st.lists(
        st.tuples(
            st.sampled_from([torch.float32, torch.bfloat16, torch.uint8, torch.int64]),
            st.lists(st.integers(0, 5), max_size=3),
        ),
        max_size=12,
    )
)
def test_layout_of_any_tensors_is_aligned_in_order_and_without_overlap(
    shapes: list[tuple[torch.dtype, list[int]]],
) -> None:
    tensors = {str(i): torch.zeros(shape, dtype=d) for i, (d, shape) in enumerate(shapes)}
    entries, total = lay_out(tensors)
    assert [entry.name for entry in entries] == list(tensors)
    end = 1 << 18  # Behind the metadata.
    for entry, tensor in zip(entries, tensors.values(), strict=True):
        assert entry.num_bytes == tensor.numel() * tensor.element_size()
        assert entry.offset % 64 == 0 and entry.offset >= end
        end = entry.offset + entry.num_bytes
    assert total >= end
