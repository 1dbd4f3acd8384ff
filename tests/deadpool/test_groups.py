"""Groups rebuilt in place, by several processes."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

from deadpool import groups as groups_module
from deadpool.groups import BuildSuperseded, GroupRegistry
from deadpool.sockets import tcp_connections

RunRanks = Callable[..., list[Any]]

TIMEOUT = timedelta(minutes=10)
"""Of every group: far longer than a test may take, so that only an abort ends a wait in time."""

BOUND_S = 100.0
"""Of one test."""


def rank() -> int:
    return int(os.environ["RANK"])


def world_size() -> int:
    return int(os.environ["WORLD_SIZE"])


class Meeting:
    """Where ranks exchange the port of each epoch's store: a store that outlives them all."""

    def __init__(self) -> None:
        self.store = dist.TCPStore(
            "127.0.0.1",
            int(os.environ["MASTER_PORT"]),
            is_master=rank() == 0,
            timeout=timedelta(seconds=BOUND_S),
        )
        # A connection that rank 0 accepted during a build would pass for one of the groups'.
        self.barrier("met")

    def connect(self, epoch: int) -> Callable[[], dist.TCPStore]:
        """`connect_store` of an epoch, whose store rank 0 opens."""

        def open_or_join() -> dist.TCPStore:
            if rank() == 0:
                own = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
                self.store.set(f"port{epoch}", str(own.port))
                return own
            port = int(self.store.get(f"port{epoch}"))
            return dist.TCPStore(
                "127.0.0.1", port, is_master=False, timeout=timedelta(seconds=BOUND_S)
            )

        return open_or_join

    def barrier(self, name: str) -> None:
        """All ranks have come here; by the store, without a group."""
        self.store.add(name, 1)
        if self.store.add(name, 0) == world_size():
            self.store.set(f"{name}/all", "yes")
        self.store.get(f"{name}/all")


def record_groups(registry: GroupRegistry) -> list[dist.ProcessGroup]:
    """The world, a pair group each, and everybody again, as placeholders."""
    with registry.recording():
        dist.init_process_group(
            "gloo",
            store=dist.HashStore(),
            rank=rank(),
            world_size=world_size(),
            timeout=TIMEOUT,
        )
        pairs = [
            dist.new_group([first, first + 1], timeout=TIMEOUT)
            for first in range(0, world_size(), 2)
        ]
        everybody = dist.new_group(list(range(world_size())), timeout=TIMEOUT)
    return [dist.group.WORLD, pairs[rank() // 2], everybody]


def build(registry: GroupRegistry, meeting: Meeting, epoch: int) -> None:
    registry.leave(epoch)
    registry.build(
        epoch=epoch,
        connect_store=meeting.connect(epoch),
        hostname="127.0.0.1",
        build_timeout_s=BOUND_S,
    )


def check_traffic(groups: list[dist.ProcessGroup], salt: int) -> None:
    """Collectives, point to point and coalesced, in every group."""
    for group in groups:
        ranks = dist.get_process_group_ranks(group)
        total = torch.tensor([float(rank() + salt)])
        dist.all_reduce(total, group=group)
        assert total.item() == sum(r + salt for r in ranks)
        gathered = [torch.zeros(1) for _ in ranks]
        dist.all_gather(gathered, torch.tensor([float(rank() * 10 + salt)]), group=group)
        assert [t.item() for t in gathered] == [r * 10.0 + salt for r in ranks]
    check_ring(salt)
    check_coalesced(groups[1], salt)
    dist.barrier()


def check_ring(salt: int) -> None:
    following, previous = (rank() + 1) % world_size(), (rank() - 1) % world_size()
    received = torch.zeros(2)
    sent = torch.tensor([float(rank()), float(salt)])
    for work in dist.batch_isend_irecv(
        [dist.P2POp(dist.isend, sent, following), dist.P2POp(dist.irecv, received, previous)]
    ):
        work.wait()
    assert received.tolist() == [previous, salt]


def check_coalesced(group: dist.ProcessGroup, salt: int) -> None:
    """As data-parallel buckets do: several reductions, waited for as one."""
    ranks = dist.get_process_group_ranks(group)
    tensors = [torch.full((3,), float(rank() + salt + i)) for i in range(3)]
    with dist._coalescing_manager(group, async_ops=True) as manager:
        for tensor in tensors:
            dist.all_reduce(tensor, group=group)
    manager.wait()
    for i, tensor in enumerate(tensors):
        assert tensor.tolist() == [float(sum(r + salt + i for r in ranks))] * 3


# Placeholders


def placeholder_program() -> None:
    """Alone, without a peer: nothing blocks and nothing moves."""
    os.environ["RANK"], os.environ["WORLD_SIZE"] = "2", "4"
    registry = GroupRegistry()
    groups = record_groups(registry)
    assert [dist.get_world_size(g) for g in groups] == [4, 2, 4]
    assert [dist.get_rank(g) for g in groups] == [2, 0, 2]
    assert [record.ranks for record in registry.records] == [(0, 1, 2, 3), (2, 3), (0, 1, 2, 3)]
    assert [record.backend_name for record in registry.records] == ["gloo"] * 3
    assert [record.timeout for record in registry.records] == [TIMEOUT] * 3
    for group in groups:
        tensor = torch.tensor([5.0])
        dist.all_reduce(tensor, group=group)
        dist.broadcast(tensor, src=dist.get_process_group_ranks(group)[0], group=group)
        dist.barrier(group=group)
        assert tensor.item() == 5.0
    assert list(tcp_connections()) == []


def test_placeholder_collectives_of_a_lone_process_return_and_move_nothing(
    run_ranks: RunRanks,
) -> None:
    run_ranks(1, placeholder_program, timeout_s=BOUND_S)


# Rebuilds


def rebuild_program(num_builds: int, with_release: bool) -> dict[str, Any]:
    released = watch_release(with_release)
    registry, meeting = GroupRegistry(), Meeting()
    groups = record_groups(registry)
    identities = [id(record.group) for record in registry.records]
    counts = []
    for epoch in range(1, num_builds + 1):
        build(registry, meeting, epoch)
        check_traffic(groups, epoch)
        assert [id(record.group) for record in registry.records] == identities
        assert dist.group.WORLD is groups[0]
        for record in registry.records:
            inside = record.group._get_backend(torch.device("cpu"))
            assert isinstance(inside, c10d.ProcessGroupGloo), inside
            assert dist.get_backend(record.group) == "gloo"
        meeting.barrier(f"used{epoch}")
        registry.abort(epoch)
        registry.leave(epoch + 1)
        registry.join_retired()
        join_helpers()
        counts.append((len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))))
    return {"counts": counts, "released": released}


def watch_release(with_release: bool) -> set[bool]:
    """What releasing the resources of a group says, or that a torch without it says no."""
    said: set[bool] = set()
    original = groups_module._release_resources

    def release(group: dist.ProcessGroup) -> bool:
        said.add(with_release and original(group))
        return said == {True}

    groups_module._release_resources = release
    return said


def join_helpers() -> None:
    """Threads that the registry started for what is over."""
    for thread in threading.enumerate():
        if thread.name.startswith("deadpool-"):
            thread.join(BOUND_S)


def test_rebuilds_in_place_carry_traffic_at_once_with_the_same_objects(
    run_ranks: RunRanks,
) -> None:
    results = run_ranks(4, rebuild_program, 4, True, timeout_s=BOUND_S)
    assert [result["released"] for result in results] == [{True}] * 4


def test_rebuilds_ten_leave_descriptors_and_threads_flat(run_ranks: RunRanks) -> None:
    for result in run_ranks(2, rebuild_program, 12, True, timeout_s=BOUND_S):
        # The first build has no earlier one to drop, and starts what is kept (store, pools).
        settled = result["counts"][2:]
        assert len(settled) == 10
        descriptors, threads = zip(*settled, strict=True)
        # A thread that was joined may be seen for a moment longer: growth shows in all of the last.
        assert min(descriptors[-3:]) <= descriptors[0], result["counts"]
        assert min(threads[-3:]) <= threads[0], result["counts"]


def test_rebuilds_without_release_resources_carry_traffic(run_ranks: RunRanks) -> None:
    """What a torch without the symbol gets: past backends stay, groups work."""
    results = run_ranks(4, rebuild_program, 3, False, timeout_s=BOUND_S)
    assert [result["released"] for result in results] == [{False}] * 4


# Aborts


def _all_reduce() -> None:
    dist.all_reduce(torch.ones(1 << 16))


def _receive() -> None:
    dist.recv(torch.zeros(4), src=0)


def _barrier() -> None:
    dist.barrier()


def _async_all_reduce() -> None:
    dist.all_reduce(torch.ones(4), async_op=True).wait()


BLOCKING = {
    "all_reduce": _all_reduce,
    "async_all_reduce": _async_all_reduce,
    "recv": _receive,
    "barrier": _barrier,
}


def abort_program(name: str) -> str:
    """All ranks but 0 block; each is woken by its own abort alone, and the next epoch works."""
    registry, meeting = GroupRegistry(), Meeting()
    groups = record_groups(registry)
    build(registry, meeting, 1)
    check_traffic(groups, 1)
    outcome = "did not block"
    if rank() != 0:
        entered = threading.Event()

        def abort_when_blocked() -> None:
            entered.wait()
            thread = threading.main_thread().native_id
            stat = Path(f"/proc/self/task/{thread}/stat")
            while stat.read_text().rsplit(")", 1)[1].split()[0] != "S":
                pass
            registry.abort(1)

        aborter = threading.Thread(target=abort_when_blocked)
        aborter.start()
        try:
            entered.set()
            BLOCKING[name]()
        except RuntimeError:
            outcome = "raised"
        aborter.join()
    meeting.barrier("all woken")
    registry.abort(1)
    build(registry, meeting, 2)
    check_traffic(groups, 2)
    return outcome


@pytest.mark.parametrize("name", BLOCKING)
def test_abort_wakes_who_is_blocked_and_the_next_build_works(
    run_ranks: RunRanks, name: str
) -> None:
    # A wait that only the groups' own timeout of 10 minutes ended would fail this bound.
    outcomes = run_ranks(4, abort_program, name, timeout_s=BOUND_S)
    assert outcomes == ["did not block", "raised", "raised", "raised"]


def late_abort_program() -> None:
    """The abort of a past epoch touches nothing of the present one."""
    registry, meeting = GroupRegistry(), Meeting()
    groups = record_groups(registry)
    build(registry, meeting, 1)
    check_traffic(groups, 1)
    meeting.barrier("used")
    registry.abort(1)
    registry.join_retired()
    build(registry, meeting, 2)
    assert registry.abort(1) == 0
    check_traffic(groups, 2)


def test_abort_of_a_past_epoch_cuts_nothing(run_ranks: RunRanks) -> None:
    run_ranks(2, late_abort_program, timeout_s=BOUND_S)


def foreign_connection_program() -> None:
    """A connection that is no group's, made before or between builds, survives aborts."""
    registry, meeting = GroupRegistry(), Meeting()
    listener = socket.create_server(("127.0.0.1", 0))
    before = socket.create_connection(listener.getsockname())
    before_peer, _ = listener.accept()
    groups = record_groups(registry)
    build(registry, meeting, 1)
    check_traffic(groups, 1)
    between = socket.create_connection(listener.getsockname())
    between_peer, _ = listener.accept()
    meeting.barrier("used")
    registry.abort(1)
    for ours, theirs in ((before, before_peer), (between, between_peer)):
        ours.sendall(b"here")
        assert theirs.recv(4) == b"here"
    build(registry, meeting, 2)
    check_traffic(groups, 2)


def test_abort_leaves_connections_of_others_alone(run_ranks: RunRanks) -> None:
    run_ranks(2, foreign_connection_program, timeout_s=BOUND_S)


# Builds that do not end


def superseded_program() -> list[str]:
    """Rank 1 never comes to epoch 1: rank 0's build ends by the abort, not by a timeout."""
    registry, meeting = GroupRegistry(), Meeting()
    groups = record_groups(registry)
    said = []
    if rank() == 0:
        connected = threading.Event()
        connect = meeting.connect(1)

        def connect_store() -> dist.TCPStore:
            store = connect()
            connected.set()
            return store

        def supersede() -> None:
            connected.wait()
            registry.abort(1)

        thread = threading.Thread(target=supersede)
        thread.start()
        try:
            registry.build(
                epoch=1,
                connect_store=connect_store,
                hostname="127.0.0.1",
                build_timeout_s=10 * BOUND_S,
            )
        except BuildSuperseded as error:
            said.append(str(error))
        thread.join()
        try:
            build(registry, meeting, 1)
        except BuildSuperseded:
            said.append("again")
    build(registry, meeting, 2)
    check_traffic(groups, 2)
    return said


def test_build_superseded_by_a_newer_epoch_raises_and_the_next_build_works(
    run_ranks: RunRanks,
) -> None:
    (first, again), others = run_ranks(2, superseded_program, timeout_s=BOUND_S)
    assert "epoch 1" in first and again == "again" and others == []


def timed_out_program() -> str:
    """A member that does not come within the bound."""
    registry, meeting = GroupRegistry(), Meeting()
    groups = record_groups(registry)
    said = ""
    if rank() == 0:
        try:
            registry.build(
                epoch=1,
                connect_store=meeting.connect(1),
                hostname="127.0.0.1",
                build_timeout_s=0.2,
            )
        except RuntimeError as error:
            said = str(error)
    build(registry, meeting, 2)
    check_traffic(groups, 2)
    return said


def test_build_that_a_member_does_not_join_raises_naming_epoch_and_bound(
    run_ranks: RunRanks,
) -> None:
    said, _ = run_ranks(2, timed_out_program, timeout_s=BOUND_S)
    assert "epoch 1" in said and "0.2 s" in said


def unsupported_program() -> str:
    registry = GroupRegistry()
    record_groups(registry)
    registry.records[1].backend_name = "ucc"
    meeting = Meeting()
    try:
        build(registry, meeting, 1)
    except ValueError as error:
        return str(error)
    return ""


def test_build_of_a_backend_that_cannot_be_repaired_names_what_fits(run_ranks: RunRanks) -> None:
    (said,) = set(run_ranks(2, unsupported_program, timeout_s=BOUND_S))
    assert "'ucc'" in said and "--distributed-backend gloo or nccl" in said
