"""Jobs that take a snapshot every few iterations."""

from __future__ import annotations

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.deadpool.test_job import PIPELINE, inject, launch

FLAGS = [*PIPELINE, "--train-iters", "14"]


def test_loss_between_snapshots_goes_back_to_one_bit_identical(run_job, peace, tmp_path):
    unfailed = peace(launch(3, 1), FLAGS)
    every = ["--deadpool-snapshot-interval", "3", "--tensorboard-dir", str(tmp_path)]
    job = run_job(launch(3, 1), [*FLAGS, *every, *inject((1, 9, "backward"))])
    job.check_clean(snapshot_interval=3)
    (swap,) = job.swaps
    # Six is captured; whether it was committed before the loss, nobody waits to know.
    assert swap["restored_iteration"] in (3, 6)
    assert swap["iterations_rerun"] == 8 - swap["restored_iteration"]
    assert job.losses == unfailed.losses
    assert job.parameters == unfailed.parameters
    snapshots = job.records("snapshots.jsonl")
    assert {s["iteration"] for s in snapshots} <= {0, 3, 6, 9, 12}
    assert {0, 3, 9} <= {s["iteration"] for s in snapshots}
    assert all(s["capture_s"] > 0 and s["replicate_s"] > 0 for s in snapshots)
    assert "snapshot replicate (ms): " in job.output
    points = EventAccumulator(str(tmp_path)).Reload().Scalars("snapshot replicate (ms)")
    assert points and all(point.value > 0 for point in points)


def test_slots_agree_on_the_longest_interval_and_a_spare_takes_it_over(run_job, peace):
    unfailed = peace(launch(3, 1), FLAGS)
    job = run_job(
        launch(3, 1),
        [*FLAGS, "--deadpool-snapshot-interval", "auto", *inject((0, 11, "backward"))],
        script="tests/deadpool/paced_pretrain.py",
    )
    job.check_clean(snapshot_interval=4)
    assert job.output.count("snapshots are taken every 4 iterations") == 1
    assert "a loss costs at most 7 completed iterations" in job.output
    (swap,) = job.swaps
    assert swap["restored_iteration"] in (7, 8)
    assert job.losses == unfailed.losses
    assert job.parameters == unfailed.parameters
    assert {s["iteration"] for s in job.records("snapshots.jsonl")} <= {*range(8), 8, 12}
