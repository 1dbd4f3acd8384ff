"""A node is lost and no spare is left: what memory holds outlives the job, or the job waits."""

from __future__ import annotations

import asyncio
import itertools
import os
import re
import signal

import pytest

from deadpool import emergency
from deadpool.integrity import Manifest, checksum, chunks
from deadpool.protocol.placement import newest_kept
from deadpool.protocol.types import Holdings, Iteration, MemberId, Slot
from tests.deadpool.job_process import FAULTY_FLAGS as FLAGS
from tests.deadpool.test_job import inject, launch, node_processes, wait_for_iteration
from tests.deadpool.test_membership import (
    GATED,
    TOKEN,
    hold,
    start_joiner,
    wait_for_swap,
    wait_until,
)

LOSSES = inject((1, 4, "backward"), (2, 6, "backward"))


@pytest.fixture
def save(tmp_path):
    return tmp_path / "checkpoints"


def saving(save) -> list[str]:
    return ["--save", str(save), "--save-interval", "100"]


def exhaust(run_job, save, *more):
    job = run_job(launch(3, 1), [*FLAGS, *LOSSES, *saving(save), *more])
    job.check_clean(exit_code=3)
    assert "node 2 was lost and no" in job.output
    (said,) = re.findall(r"iteration (\d+) is kept in (\S+);", job.output)
    kept = Iteration(int(said[0]))
    assert kept in (4, 5), "at most the last iteration is run again"
    assert said[1] == emergency.folder_of(str(save), kept)
    return job, kept


def resume(run_job, save):
    return run_job(launch(3, 1), [*FLAGS, "--load", str(save), *saving(save)])


def check_goes_on(job, kept, unfailed):
    job.check_clean()
    assert f"going on from iteration {kept}" in job.output
    assert job.losses == {i: x for i, x in unfailed.losses.items() if i > kept}
    assert job.parameters == unfailed.parameters


def test_job_without_a_spare_is_gone_on_with_bit_identical(run_job, peace, save):
    _, kept = exhaust(run_job, save)
    check_goes_on(resume(run_job, save), kept, peace(launch(3, 1), FLAGS))


def test_job_waits_for_a_node_that_joins(run_job, peace, data_cache):
    flags = [*FLAGS, "--deadpool-on-exhausted", "wait"]
    joiners = []

    def lose_two_and_join(pid, log_dir):
        gates = [hold(log_dir, 3), hold(log_dir, 5)]
        wait_for_iteration(log_dir, 2)
        nodes = node_processes(pid)
        os.killpg(nodes[1].pid, signal.SIGKILL)
        gates[0].unlink()
        wait_for_swap(log_dir)
        os.killpg(nodes[2].pid, signal.SIGKILL)
        wait_until(lambda: "waiting for one" in output_of(log_dir), "it does not wait")
        joiners.append(start_joiner(pid, log_dir, data_cache))
        gates[1].unlink()

    try:
        job = run_job(launch(3, 1), flags, during=lose_two_and_join, script=GATED, environ=TOKEN)
        output, _ = joiners[0].communicate(timeout=60)
    finally:
        for joiner in joiners:
            joiner.kill()
            joiner.wait()
    job.check_clean()
    assert joiners[0].returncode == 0, output
    assert [s["spares_used"] for s in job.swaps] == [[2], [7]]
    unfailed = peace(launch(3, 1), FLAGS)
    assert (job.losses, job.parameters) == (unfailed.losses, unfailed.parameters)


def output_of(log_dir) -> str:
    return (log_dir.parent / "output").read_text(errors="replace")


def test_job_waits_for_a_node_that_does_not_come_and_keeps_its_state(run_job, peace, save):
    waits = ("--deadpool-on-exhausted", "wait", "--deadpool-exhausted-timeout", "3")
    job, kept = exhaust(run_job, save, *waits)
    assert "no node joined in time" in job.output
    check_goes_on(resume(run_job, save), kept, peace(launch(3, 1), FLAGS))


def test_kept_snapshot_that_is_damaged_ends_the_next_job_with_its_name(run_job, save):
    _, kept = exhaust(run_job, save)
    path = save / "deadpool-emergency" / f"iter_{kept:07d}" / "slot_00002.snapshot"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    job = resume(run_job, save)
    job.check_clean(exit_code=4)
    assert f"{path} is damaged" in job.output and "to go on from the checkpoint" in job.output


def test_newest_iteration_that_memory_holds_is_found_as_by_trying_all() -> None:
    """Every way to hold iterations 1 and 2 of two slots by two members; one may be lost."""
    options = [frozenset(x) for n in range(3) for x in itertools.combinations((1, 2), n)]
    slot_of = {MemberId(7): Slot(0), MemberId(8): Slot(1)}
    for own, replicas in itertools.product(itertools.product(options, repeat=2), repeat=2):
        for alive in ([7], [8], [7, 8]):
            holdings = {
                MemberId(7 + k): Holdings(
                    own=own[k], replicas=frozenset((Slot(1 - k), i) for i in replicas[k])
                )
                for k in range(2)
                if 7 + k in alive
            }
            of_self = {i: {k for k in range(2) if 7 + k in alive and i in own[k]} for i in (1, 2)}
            copies = {
                i: {1 - k for k in range(2) if 7 + k in alive and i in replicas[k]} for i in (1, 2)
            }
            whole = [i for i in (1, 2) if of_self[i] | copies[i] == {0, 1}]
            expected = (max(whole), tuple({0, 1} - of_self[max(whole)])) if whole else None
            known = {x: slot_of[x] for x in holdings}
            assert newest_kept(2, holdings, known) == expected


def keep(directory, slot: int, iteration: int, payload: bytes, world_size: int = 2) -> None:
    view = memoryview(payload)
    manifest = Manifest.of(
        slot=Slot(slot),
        iteration=Iteration(iteration),
        num_bytes=len(view),
        sums=[checksum(chunk) for chunk in chunks(view)],
    )
    asyncio.run(emergency.write(str(directory), manifest, view, world_size))


def test_what_is_kept_is_found_once_it_is_whole_and_read_as_it_was(tmp_path) -> None:
    directory = str(tmp_path)
    assert emergency.newest(directory, 2) is None
    for slot, iteration in ((0, 5), (1, 5), (0, 6)):
        keep(directory, slot, iteration, bytes([slot, iteration]) * 1000)
    assert emergency.newest(directory, 2) == 5, "one slot of 6 is missing"
    assert emergency.newest(directory, 1) is None, "another number of ranks"
    payload = bytearray(2000)
    emergency.read(directory, Iteration(5), Slot(1), memoryview(payload))
    assert payload == bytes([1, 5]) * 1000
    with pytest.raises(emergency.Unreadable, match="takes 10"):
        emergency.read(directory, Iteration(5), Slot(1), memoryview(bytearray(10)))


@pytest.mark.parametrize("place", range(0, 2000, 199))
def test_damaged_bytes_on_disk_are_not_read(tmp_path, place: int) -> None:
    directory = str(tmp_path)
    keep(directory, 0, 5, bytes(2000))
    path = next(tmp_path.rglob("*.snapshot"))
    data = bytearray(path.read_bytes())
    data[place] ^= 16
    path.write_bytes(data)
    with pytest.raises(emergency.Unreadable, match="is damaged"):
        emergency.read(directory, Iteration(5), Slot(0), memoryview(bytearray(2000)))


def test_sums_that_are_damaged_or_torn_count_as_not_there(tmp_path) -> None:
    directory = str(tmp_path)
    keep(directory, 0, 5, bytes(2000), world_size=1)
    path = next(tmp_path.rglob("*.json"))
    text = path.read_text()
    for torn in ("", text[:-20], "[]", "{}", "null"):
        path.write_text(torn)
        assert emergency.newest(directory, 1) is None
        with pytest.raises(emergency.Unreadable):
            emergency.read(directory, Iteration(5), Slot(0), memoryview(bytearray(2000)))
