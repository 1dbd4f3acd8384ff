"""Trainers that crash on living nodes: started anew from their node's memory, without a spare."""

from __future__ import annotations

import os
import signal

import pytest

from tests.deadpool.job_process import FAULTY_FLAGS as FLAGS
from tests.deadpool.test_job import inject, launch, node_processes, wait_for_iteration


def crash(slot, iteration, phase, fault=signal.SIGKILL, times=1):
    told = {"slot": slot, "iteration": iteration, "phase": phase, "times": times}
    return {**told, "fault": fault}


def events(job) -> list[tuple[str, list[int], list[int]]]:
    return [
        (r["event"], r["respawned"] or r["nodes_lost"], r["spares_used"])
        for r in job.records("events.jsonl")
    ]


def check_same(job, unfailed) -> None:
    job.check_clean()
    assert job.losses == unfailed.losses
    assert job.parameters == unfailed.parameters


@pytest.mark.parametrize("slot", [0, 3], ids=["leader", "last"])
@pytest.mark.parametrize("phase", ["forward", "backward", "optimizer", "capture"])
def test_killed_trainer_is_started_anew_bit_identical(run_faulty, peace, slot, phase):
    unfailed = peace(launch(3, 1), FLAGS)
    job = run_faulty([crash(slot, 4, phase)])
    check_same(job, unfailed)
    assert events(job) == [("respawn", [slot // 2], [])]
    assert f"trainer of node {slot // 2} started anew (SIGKILL)" in job.output
    (record,) = job.records("events.jsonl")
    assert record["num_bytes"] == 0, "its own node's memory has the snapshot"


def test_segmentation_fault_in_the_first_iteration_is_survived(run_faulty, peace):
    job = run_faulty([crash(1, 1, "forward", signal.SIGSEGV)])
    check_same(job, peace(launch(3, 1), FLAGS))
    assert events(job) == [("respawn", [0], [])]


def test_two_trainers_that_crash_together_are_both_started_anew(run_faulty, peace):
    crashes = [crash(x, 4, "forward", signal.SIGSEGV) for x in (1, 2)]
    job = run_faulty(crashes)
    check_same(job, peace(launch(3, 1), FLAGS))
    restarted = {node for kind, nodes, spares in events(job) for node in nodes}
    assert restarted == {0, 1} and {(k, *s) for k, _, s in events(job)} == {("respawn",)}


@pytest.mark.parametrize("slot", [0, 2], ids=["survivor", "itself"])
def test_crash_while_another_is_mended_is_mended(run_faulty, peace, slot):
    job = run_faulty([crash(2, 4, "backward"), crash(slot, 3 if slot != 2 else 0, "rejoin")])
    check_same(job, peace(launch(3, 1), FLAGS))
    assert all((kind, used) == ("respawn", []) for kind, _, used in events(job))


def test_crash_while_a_node_is_replaced_is_mended(run_faulty, peace):
    job = run_faulty([crash(0, 3, "rejoin")], *inject((1, 4, "backward")))
    check_same(job, peace(launch(3, 1), FLAGS))
    assert [used for _, _, used in events(job)] == [[2]]


def test_trainer_of_a_spare_is_started_anew_and_takes_its_place(run_job, peace):
    unfailed = peace(launch(3, 1), FLAGS)

    def kill_spare(pid, log_dir):
        wait_for_iteration(log_dir, 2)
        node = node_processes(pid)[2]
        for process in node.children(recursive=True):
            if process.name() == "dp-trainer":
                process.kill()

    job = run_job(launch(3, 1), [*FLAGS, *inject((1, 5, "forward"))], during=kill_spare)
    check_same(job, unfailed)
    assert events(job) == [("swap", [1], [2])]


def test_zygote_that_is_killed_costs_its_node(run_job, peace):
    """Nobody is left to start a trainer anew."""
    unfailed = peace(launch(3, 1), FLAGS)

    def kill_zygote(pid, log_dir):
        wait_for_iteration(log_dir, 2)
        node = node_processes(pid)[1]
        zygotes = [p for p in node.children(recursive=True) if p.name() == "dp-zygote"]
        os.kill(zygotes[0].pid, signal.SIGKILL)

    job = run_job(launch(3, 1), FLAGS, during=kill_zygote)
    check_same(job, unfailed)
    assert events(job) == [("swap", [1], [2])]


def test_more_crashes_than_are_allowed_cost_the_node(run_faulty, peace):
    crashes = [crash(2, 3, "forward"), crash(2, 5, "forward")]
    job = run_faulty(crashes, "--deadpool-max-respawns", "1")
    check_same(job, peace(launch(3, 1), FLAGS))
    assert events(job) == [("respawn", [1], []), ("swap", [1], [2])]


def test_no_respawns_allowed_a_crash_costs_the_node(run_faulty, peace):
    job = run_faulty([crash(2, 3, "forward")], "--deadpool-max-respawns", "0")
    check_same(job, peace(launch(3, 1), FLAGS))
    assert events(job) == [("swap", [1], [2])]


def test_program_that_crashes_at_one_place_again_gets_another_node(run_faulty, peace):
    job = run_faulty([crash(2, 4, "backward", signal.SIGSEGV, times=2)])
    check_same(job, peace(launch(3, 1), FLAGS))
    assert events(job)[-1][0] == "swap" and events(job)[-1][2] == [2]


def test_program_that_crashes_at_one_place_on_two_nodes_ends_the_job_with_it(run_faulty):
    job = run_faulty([crash(2, 4, "backward", signal.SIGSEGV, times=99)], nodes=4, spares=2)
    job.check_clean(exit_code=1)
    assert "the trainer of slot 2 ended with SIGSEGV in the iteration after 3" in job.output


def test_crash_of_a_trainer_with_loader_workers_is_mended(run_faulty, peace):
    workers = ["--num-workers", "2"]
    unfailed = peace(launch(3, 1), [*FLAGS, *workers])
    job = run_faulty([crash(3, 4, "forward")], *workers)
    check_same(job, unfailed)
    assert events(job) == [("respawn", [1], [])]
