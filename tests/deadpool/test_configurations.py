"""A swap in every kind of configuration that the driver trains."""

from __future__ import annotations

import pytest

LAUNCH = ["--nodes", "3", "--ranks-per-node", "2", "--spare-nodes", "1"]

CONFIGURATIONS = {
    "fp32": "--tensor-model-parallel-size 2",
    # The scaler's state changes and iterations are skipped until the scale fits.
    "fp16-dynamic-scale": "--fp16 --initial-loss-scale 8388608 --loss-scale-window 2 "
    "--hysteresis 1",
    "interleaved": "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1 "
    "--bf16 --use-tp-pp-dp-mapping",
    "overlap": "--overlap-grad-reduce --overlap-param-gather --bf16",
    "llama": "--swiglu --position-embedding-type rope --group-query-attention "
    "--num-query-groups 2 --disable-bias-linear --untie-embeddings-and-output-weights "
    "--normalization RMSNorm --bf16",
    "recompute": "--recompute-granularity full --recompute-method uniform "
    "--recompute-num-layers 1 --bf16 --pipeline-model-parallel-size 2",
    "sums-over-log-interval": "--log-interval 3 --pipeline-model-parallel-size 2",
    "rampup": "--rampup-batch-size 4 4 16 --train-samples 40 --lr-decay-samples 80 "
    "--lr-warmup-samples 8",
    "loader-workers": "--num-workers 2 --pipeline-model-parallel-size 2 --use-tp-pp-dp-mapping",
    "moe-allgather": "--num-experts 4 --expert-model-parallel-size 2 --moe-router-topk 2 "
    "--moe-token-dispatcher-type allgather --moe-aux-loss-coeff 0.01 --bf16",
    "moe-overlap": "--num-experts 4 --expert-model-parallel-size 2 --moe-router-topk 2 "
    "--moe-token-dispatcher-type alltoall --bf16 --overlap-grad-reduce --overlap-param-gather",
}

SAMPLES = {"rampup"}


def arguments(name: str) -> list[str]:
    flags = CONFIGURATIONS[name].split()
    return flags if name in SAMPLES else [*flags, "--train-iters", "6"]


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_kill_in_configuration_continues_bit_identical(run_job, peace, name):
    drop = ("--lr-decay-iters", "--lr-warmup-iters") if name in SAMPLES else ()
    unfailed = peace(LAUNCH, arguments(name), drop=drop)
    position = list(CONFIGURATIONS).index(name)
    # Not inside the optimizer: fp16 skips it while the scale does not fit.
    phase = ["backward", "replicate"][position % 2]
    job = run_job(
        LAUNCH,
        [
            *arguments(name),
            f"--deadpool-inject=kill-node={position // 2 % 2}@iteration=4,phase={phase}",
        ],
        drop=drop,
    )
    job.check_clean()
    assert len(job.swaps) == 1
    assert job.losses == unfailed.losses
    assert len(job.losses) >= 6
    assert job.parameters == unfailed.parameters


@pytest.mark.parametrize("more", ["", "--bf16", "--bf16 --optimizer sgd --sgd-momentum 0.9"])
def test_kill_without_distributed_optimizer_continues_bit_identical(run_job, peace, more):
    flags = [*more.split(), "--train-iters", "6", "--tensor-model-parallel-size", "2"]
    drop = ("--use-distributed-optimizer",)
    unfailed = peace(LAUNCH, flags, drop=drop)
    job = run_job(
        LAUNCH, [*flags, "--deadpool-inject=kill-node=0@iteration=4,phase=optimizer"], drop=drop
    )
    job.check_clean()
    assert len(job.swaps) == 1
    assert job.losses == unfailed.losses
    assert job.parameters == unfailed.parameters


def test_kill_with_evaluation_and_saving_continues_bit_identical(run_job, peace, tmp_path):
    flags = "--train-iters 6 --eval-interval 2 --eval-iters 2 --split 60,40,0 --bf16".split()
    unfailed = peace(LAUNCH, flags)
    saving = ["--save", str(tmp_path), "--save-interval", "3"]
    job = run_job(
        LAUNCH,
        [*flags, *saving, "--deadpool-inject=kill-node=1@iteration=4,phase=optimizer"],
    )
    job.check_clean()
    assert job.losses == unfailed.losses
    assert job.parameters == unfailed.parameters
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text() == "6"
    validation = [line for line in unfailed.output.splitlines() if "validation loss" in line]
    assert len(validation) >= 3
    assert set(validation) <= set(job.output.splitlines())
