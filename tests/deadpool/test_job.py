"""The life of a job: losses one after the other, its end, bad input."""

from __future__ import annotations

import json
import os
import signal
import time

import psutil
import pytest

PIPELINE = "--pipeline-model-parallel-size 2 --use-tp-pp-dp-mapping --bf16".split()


def launch(nodes: int, spares: int, *more: str, ranks: int = 2) -> list[str]:
    return [
        *("--nodes", str(nodes), "--ranks-per-node", str(ranks), "--spare-nodes", str(spares)),
        *more,
    ]


def inject(*faults: tuple[int, int, str]) -> list[str]:
    return [
        f"--deadpool-inject=kill-node={node}@iteration={iteration},phase={phase}"
        for node, iteration, phase in faults
    ]


def test_two_losses_with_two_spares_continue_bit_identical(run_job, peace):
    flags = [*PIPELINE, "--train-iters", "7"]
    unfailed = peace(launch(4, 2), flags)
    faults = inject((0, 3, "backward"), (2, 5, "optimizer"))
    job = run_job(launch(4, 2), [*flags, *faults])
    job.check_clean()
    assert [(s["nodes_lost"], s["spares_used"]) for s in job.swaps] == [([0], [2]), ([2], [3])]
    assert job.losses == unfailed.losses
    assert job.parameters == unfailed.parameters


def test_loss_of_a_spare_changes_nothing(run_job, peace):
    flags = [*PIPELINE, "--train-iters", "7"]
    unfailed = peace(launch(4, 2), flags)

    def kill_spare(pid, log_dir):
        wait_for_iteration(log_dir, 2)
        node = node_processes(pid)[3]
        os.killpg(node.pid, signal.SIGKILL)

    job = run_job(launch(4, 2), flags, during=kill_spare)
    job.check_clean()
    assert job.swaps == []
    assert job.losses == unfailed.losses


def test_loss_without_a_spare_left_ends_with_its_cause(run_job):
    flags = [*PIPELINE, "--train-iters", "7"]
    job = run_job(launch(3, 1), [*flags, *inject((0, 2, "forward"), (2, 4, "forward"))])
    job.check_clean(exit_code=3)
    assert "no complete spare node is left" in job.output


def test_loss_of_the_leader_without_a_spare_left_ends_with_its_cause(run_job):
    """The other half cannot know whether the leader's is gone, but neither could train on."""
    flags = [*PIPELINE, "--train-iters", "7"]
    job = run_job(launch(3, 1), [*flags, *inject((1, 2, "forward"), (0, 4, "forward"))])
    job.check_clean(exit_code=6)
    assert "no complete spare node is left" in job.output


def test_error_in_training_ends_the_job_with_it(run_job, tmp_path):
    script = tmp_path / "broken.py"
    script.write_text(
        "import sys\n"
        "from deadpool import run\n"
        "def train(argv, hooks):\n"
        "    hooks.acquire_rank(None)\n"
        "    hooks._fail('ZeroDivisionError: division by zero', 1)\n"
        "    return 1\n"
        "sys.exit(run.main(sys.argv[1:], train=train, check=lambda argv: 0))\n"
    )
    job = run_job(launch(3, 1), ["--train-iters", "7"], script=str(script))
    job.check_clean(exit_code=1)
    assert "division by zero" in job.output


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGKILL, -9)]
)
def test_launcher_ended_from_outside_leaves_nothing(run_job, number, code):
    def end_it(pid, log_dir):
        wait_for_iteration(log_dir, 2)
        os.kill(pid, number)

    job = run_job(launch(3, 1), [*PIPELINE, "--train-iters", "1000"], during=end_it)
    job.check_clean(exit_code=code)


def test_sigterm_with_exit_signal_handler_saves_and_ends_well(run_job, tmp_path):
    def end_it(pid, log_dir):
        wait_for_iteration(log_dir, 2)
        os.kill(pid, signal.SIGTERM)

    flags = [*PIPELINE, "--train-iters", "1000", "--exit-signal-handler", "--save", str(tmp_path)]
    job = run_job(launch(3, 1), [*flags, "--save-interval", "1000"], during=end_it)
    job.check_clean()
    saved = int((tmp_path / "latest_checkpointed_iteration.txt").read_text())
    assert saved == max(job.losses)


def test_twenty_swaps_leave_resources_flat(run_job):
    """Node 0 survives twenty losses of its neighbour; lost nodes return as spares."""
    job = run_job(
        launch(6, 4, "--restart-lost-nodes"),
        [*PIPELINE, "--train-iters", "44"],
        timeout_s=280,
        script="tests/deadpool/measured_pretrain.py",
    )
    job.check_clean()
    assert len(job.swaps) == 20
    assert all(len(swap["nodes_lost"]) == 1 for swap in job.swaps)
    resources = [r for r in job.records("resources.jsonl") if r["slot"] == 0]
    assert len({r["pid"] for r in resources}) == 1
    early = [r for r in resources if 6 <= r["iteration"] <= 12]
    late = [r for r in resources if r["iteration"] >= 36]
    for name, slack in [("groups", 0), ("threads", 2), ("descriptors", 4)]:
        # The retired backends of the last swap may still be on their way out: take the least.
        assert min(r[name] for r in late) <= min(r[name] for r in early) + slack, name
    growth = min(r["rss_bytes"] for r in late) - min(r["rss_bytes"] for r in early)
    assert growth < 8 << 20, f"{growth} bytes over 15 swaps"


# Bad input


@pytest.mark.parametrize(
    ("launching", "arguments", "words"),
    [
        (launch(3, 1), ["--tensor-model-parallel-size", "3"], ["--tensor-model-parallel-size 3"]),
        (launch(2, 0), [], ["--spare-nodes 0", "no spare node"]),
        (launch(2, 1), [], ["training on one node", "at least 2 nodes"]),
        (launch(2, 2), [], ["--spare-nodes 2 of --nodes 2"]),
        (launch(3, 1), inject((1, 3, "lunch")), ["no phase 'lunch'", "backward"]),
        (launch(3, 1), inject((7, 3, "forward")), ["kill-node=7", "0 to 2"]),
        (launch(3, 1), ["--deadpool-recovery-timout", "3"], ["--deadpool-recovery-timeout?"]),
        (launch(3, 1), ["--deadpool-interface", "hsn7"], ["--deadpool-interface hsn7", "lo"]),
        (launch(3, 1), ["--global-batch-size", "7"], ["--global-batch-size"]),
        (launch(3, 1), ["--data-path", "/nowhere/at/all"], ["/nowhere/at/all"]),
    ],
)
def test_bad_input_ends_before_any_process_group(run_job, launching, arguments, words):
    job = run_job(launching, ["--train-iters", "2", *arguments])
    job.check_clean(exit_code=2)
    for word in words:
        assert word in job.output
    messages = [
        line for line in job.output.splitlines() if line.startswith(("deadpool:", "error:"))
    ]
    assert len(messages) == 1, job.output
    assert job.records("losses.jsonl") == []


def test_checkpoint_of_another_model_is_refused(run_job, tmp_path):
    save = ["--save", str(tmp_path), "--save-interval", "2", "--train-iters", "2"]
    run_job(launch(3, 1), [*PIPELINE, *save]).check_clean()
    job = run_job(
        launch(3, 1),
        [*PIPELINE, "--load", str(tmp_path), "--train-iters", "4", "--num-layers", "8"],
    )
    job.check_clean(exit_code=2)
    assert "--num-layers" in job.output


def test_resume_from_checkpoint_survives_a_loss(run_job, peace, tmp_path):
    flags = [*PIPELINE, "--lr-decay-iters", "20"]
    whole = peace(launch(3, 1), [*flags, "--train-iters", "6"])
    flags += ["--train-iters", "6"]
    save = ["--save", str(tmp_path), "--save-interval", "3", "--exit-interval", "3"]
    run_job(launch(3, 1), [*flags, *save]).check_clean()
    job = run_job(launch(3, 1), [*flags, "--load", str(tmp_path), *inject((1, 5, "backward"))])
    job.check_clean()
    assert job.losses == {i: loss for i, loss in whole.losses.items() if i > 3}
    assert job.parameters == whole.parameters


# Looking at a running job


def wait_for_iteration(log_dir, iteration, timeout_s=60.0):
    """Until the log says that `iteration` is complete."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        try:
            lines = (log_dir / "losses.jsonl").read_text().splitlines()
            if lines and json.loads(lines[-1])["iteration"] >= iteration:
                return
        except FileNotFoundError:
            pass
        time.sleep(0.02)
    raise AssertionError(f"iteration {iteration} was not reached")


def node_processes(launcher_pid):
    """The process of each virtual node, in order of start."""
    below = psutil.Process(launcher_pid).children(recursive=True)
    return sorted((p for p in below if p.name() == "dp-node"), key=lambda p: p.pid)


def kill_peers(pid, log_dir):
    """Nodes 0 and 2, which hold each other's first replica, in the same instant."""
    wait_for_iteration(log_dir, 3)
    nodes = node_processes(pid)
    for victim in (nodes[0], nodes[2]):
        os.killpg(victim.pid, signal.SIGKILL)


def test_two_nodes_lost_at_once_are_survived_with_two_replicas(run_job, peace):
    flags = [*PIPELINE, "--train-iters", "9"]
    unfailed = peace(launch(6, 2, ranks=1), flags)
    job = run_job(launch(6, 2, ranks=1), [*flags, "--deadpool-replicas", "2"], during=kill_peers)
    job.check_clean()
    assert sorted(node for swap in job.swaps for node in swap["nodes_lost"]) == [0, 2]
    assert job.losses == unfailed.losses
    assert job.parameters == unfailed.parameters
    assert "The state survives the loss of any 2 nodes" in job.output


def test_two_peers_lost_at_once_with_one_replica_end_with_how_to_resume(run_job):
    flags = [*PIPELINE, "--train-iters", "9"]
    job = run_job(launch(6, 2, ranks=1), flags, during=kill_peers)
    job.check_clean(exit_code=4)
    assert "resume from the last checkpoint with --load" in job.output
