"""Inconsistent flags end with one message that names the flag, what was given and what fits."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

import pytest

from megatron.training.arguments import UsageError, parse_args, validate_args
from megatron.training.arguments.machine import Machine

CPU = Machine(has_gpu=False)
HOPPER = Machine(
    has_gpu=True,
    device_generation=9,
    transformer_engine=(2, 9),
    apex_norm=True,
    apex_softmax=True,
    apex_rope=True,
    apex_weight_gradient=True,
)
BARE_GPU = Machine(has_gpu=True, device_generation=9)
BASE = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 64 "
    "--max-position-embeddings 64 --micro-batch-size 2 --lr 1e-3 --eval-iters 0 --split 99,1,0 "
)
ITERATIONS = BASE + "--train-iters 10 "
PLAIN = ITERATIONS + "--mock-data --tokenizer-type ByteTokenizer "
REAL = ITERATIONS + "--tokenizer-type ByteTokenizer "
UNSPLIT = REAL.replace("--split 99,1,0", "")


def validated(flags: str, world_size: int = 1, machine: Machine = CPU) -> Namespace:
    return validate_args(parse_args(flags.split()), world_size, machine)


def message(flags: str, world_size: int = 1, machine: Machine = CPU) -> str:
    with pytest.raises(UsageError) as refused:
        validated(flags, world_size, machine)
    return str(refused.value)


BAD = {
    "world not divisible": (
        "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2",
        6,
        ["world size 6", "2 x", "= 4 ranks", "4, 8, 12, 16", "1, 2, 3, 6"],
    ),
    "world not divisible by experts": (
        "--num-experts 4 --expert-model-parallel-size 4",
        6,
        ["world size 6", "--expert-model-parallel-size 4", "4, 8, 12"],
    ),
    "size zero": ("--pipeline-model-parallel-size 0", 1, ["--pipeline-model-parallel-size 0"]),
    "hidden over heads": (
        "--hidden-size 65",
        1,
        ["--hidden-size 65", "--num-attention-heads 4", "64, 68", "1, 5, 13, 65"],
    ),
    "heads over tensor": (
        "--num-attention-heads 2 --tensor-model-parallel-size 4",
        4,
        ["--num-attention-heads 2", "--tensor-model-parallel-size 4", "4, 8"],
    ),
    "ffn over tensor": (
        "--ffn-hidden-size 101 --tensor-model-parallel-size 2",
        2,
        ["--ffn-hidden-size 101", "100, 102"],
    ),
    "query groups": (
        "--group-query-attention --num-query-groups 3",
        1,
        ["--num-query-groups 3", "1, 2, 4"],
    ),
    "query groups alone": ("--num-query-groups 2", 1, ["--group-query-attention"]),
    "layers over stages": (
        "--num-layers 5 --pipeline-model-parallel-size 2",
        2,
        ["--num-layers 5", "--pipeline-model-parallel-size 2", "4, 6, 8", "1, 5"],
    ),
    "layers over chunks": (
        "--num-layers 8 --pipeline-model-parallel-size 2 "
        "--num-layers-per-virtual-pipeline-stage 3 --global-batch-size 8",
        2,
        ["--num-layers-per-virtual-pipeline-stage 3", "4 layers", "1, 2, 4"],
    ),
    "virtual stages": (
        "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 3",
        2,
        ["--num-virtual-stages-per-pipeline-rank 3", "6 chunks", "6, 12"],
    ),
    "two ways to interleave": (
        "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2 "
        "--num-layers-per-virtual-pipeline-stage 1",
        2,
        ["--num-virtual-stages-per-pipeline-rank", "--num-layers-per-virtual-pipeline-stage"],
    ),
    "interleaved without stages": (
        "--num-virtual-stages-per-pipeline-rank 2",
        1,
        ["--pipeline-model-parallel-size 2 or more", "given 1"],
    ),
    "interleaved without overlap": (
        "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2 "
        "--no-overlap-p2p-communication --global-batch-size 8",
        2,
        ["--no-overlap-p2p-communication", "--pipeline-model-parallel-size 3 or more", "given 2"],
    ),
    "interleaved with too few microbatches": (
        "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2 "
        "--global-batch-size 6",
        2,
        ["3 microbatches", "--global-batch-size that fits: 4, 8"],
    ),
    "uneven stages": (
        "--num-layers 8 --pipeline-model-parallel-size 4 --decoder-first-pipeline-num-layers 1",
        4,
        ["--decoder-first-pipeline-num-layers", "remaining 7", "3 pipeline stages"],
    ),
    "layout": (
        "--pipeline-model-parallel-size 2 --pipeline-model-parallel-layout Et|t|ttL",
        2,
        ["3 stages", "--pipeline-model-parallel-size 2", "2, 4"],
    ),
    "layout of other depth": (
        "--pipeline-model-parallel-size 2 --pipeline-model-parallel-layout Et|tL",
        2,
        ["--pipeline-model-parallel-layout 'Et|tL'", "--num-layers 4"],
    ),
    "global batch": (
        "--global-batch-size 6",
        2,
        ["--global-batch-size 6", "--micro-batch-size 2", "= 4", "4, 8"],
    ),
    "positions": (
        "--seq-length 128",
        1,
        ["--seq-length 128", "--max-position-embeddings 64", "at least 128"],
    ),
    "expert number": (
        "--num-experts 3 --expert-model-parallel-size 2",
        2,
        ["--num-experts 3", "--expert-model-parallel-size 2", "2, 4"],
    ),
    "experts missing": ("--expert-model-parallel-size 2", 2, ["needs --num-experts", "2, 4"]),
    "router topk": ("--num-experts 2 --moe-router-topk 3", 1, ["--moe-router-topk 3", "1 to"]),
    "expert tensor parallel": (
        "--num-experts 4 --tensor-model-parallel-size 2",
        2,
        ["--num-experts 4", "--tensor-model-parallel-size 2", "--sequence-parallel"],
    ),
    "flex dispatcher": (
        "--num-experts 4 --moe-token-dispatcher-type flex",
        1,
        ["--moe-token-dispatcher-type flex", "alltoall"],
    ),
    "shared experts with bias": (
        "--num-experts 4 --moe-shared-expert-intermediate-size 64",
        1,
        ["--moe-shared-expert-intermediate-size 64", "--disable-bias-linear"],
    ),
    "expert tensor size with bias": (
        "--num-experts 4 --expert-tensor-parallel-size 2 --moe-token-dispatcher-type alltoall",
        2,
        ["--expert-tensor-parallel-size 2", "--disable-bias-linear"],
    ),
    "expert bias": (
        "--num-experts 4",
        1,
        ["--num-experts 4", "--expert-model-parallel-size 1", "--disable-bias-linear"],
    ),
    "sinkhorn": (
        "--num-experts 4 --moe-router-load-balancing-type sinkhorn --moe-aux-loss-coeff 0.1",
        1,
        ["--moe-aux-loss-coeff 0.1", "sinkhorn"],
    ),
    "probs on input": (
        "--num-experts 4 --moe-apply-probs-on-input",
        1,
        ["--moe-apply-probs-on-input needs --moe-router-topk 1, given 2"],
    ),
    "layer pattern": (
        "--num-experts 4 --moe-layer-freq [1]*3",
        1,
        ["--moe-layer-freq", "3 layers", "--num-layers is 4"],
    ),
    "aux loss weights": (
        "--num-experts 4 --moe-aux-loss-coeff 1e-2 1e-3",
        1,
        ["--moe-aux-loss-coeff", "1 types, 2 weights"],
    ),
    "precision": ("--fp16 --bf16", 1, ["--fp16 and --bf16"]),
    "fp16 loss": ("--fp16-lm-cross-entropy", 1, ["--fp16-lm-cross-entropy needs --fp16"]),
    "fp32 residual": ("--fp32-residual-connection", 1, ["--fp32-residual-connection needs"]),
    "gradient dtype": ("--main-grads-dtype bf16", 1, ["--use-precision-aware-optimizer"]),
    "param gather": (
        "--overlap-param-gather --overlap-grad-reduce",
        1,
        ["--overlap-param-gather needs --use-distributed-optimizer"],
    ),
    "param gather alone": (
        "--overlap-param-gather --use-distributed-optimizer",
        1,
        ["needs --overlap-grad-reduce"],
    ),
    "sequence parallel": (
        "--tensor-model-parallel-size 2 --sequence-parallel",
        2,
        ["--sequence-parallel needs the norms of", "leave --sequence-parallel out"],
    ),
    "context parallel": (
        "--context-parallel-size 2",
        2,
        ["--context-parallel-size 2", "Transformer Engine"],
    ),
    "transformer engine": (
        "--transformer-impl transformer_engine",
        1,
        ["--transformer-impl transformer_engine", "no GPU", "--transformer-impl local"],
    ),
    "inference": ("--transformer-impl inference_optimized", 1, ["inference_optimized"]),
    "nccl": ("--distributed-backend nccl", 1, ["--distributed-backend nccl", "gloo"]),
    "fp8": ("--fp8-format hybrid --bf16", 1, ["--fp8-format hybrid", "Transformer Engine"]),
    "grouped gemm": (
        "--num-experts 2 --moe-grouped-gemm --disable-bias-linear",
        1,
        ["--moe-grouped-gemm needs"],
    ),
    "precision aware": (
        "--use-precision-aware-optimizer --use-distributed-optimizer",
        1,
        ["--use-precision-aware-optimizer needs Transformer Engine"],
    ),
    "flash": ("--attention-backend flash", 1, ["--attention-backend flash", "unfused"]),
    "layernorm 1p": ("--apply-layernorm-1p", 1, ["--apply-layernorm-1p"]),
    "muon": ("--optimizer muon", 1, ["--optimizer muon", "adam or sgd"]),
    "yarn": ("--rope-type yarn", 1, ["--rope-type yarn", "rope"]),
    "relative positions": (
        "--position-embedding-type relative",
        1,
        ["--position-embedding-type relative", "learned_absolute, rope or none"],
    ),
    "no position": ("--no-position-embedding", 1, ["--position-embedding-type none"]),
    "tiny swiglu": ("--swiglu --hidden-size 16", 1, ["--hidden-size 16", "--ffn-hidden-size"]),
    "sgd shards": (
        "--optimizer sgd --use-distributed-optimizer",
        1,
        ["--optimizer sgd", "--use-distributed-optimizer"],
    ),
    "router topk 1": (
        "--num-experts 2 --moe-router-topk 1 --disable-bias-linear",
        1,
        ["--moe-router-pre-softmax"],
    ),
    "two activations": ("--swiglu --squared-relu", 1, ["--swiglu and --squared-relu"]),
    "recompute method": ("--recompute-method uniform", 1, ["--recompute-granularity full"]),
    "recompute layers": (
        "--recompute-granularity full --recompute-method block",
        1,
        ["--recompute-num-layers from 1 to 4"],
    ),
    "recomputed norms": (
        "--recompute-granularity selective --recompute-modules layernorm",
        1,
        ["--recompute-modules layernorm needs"],
    ),
    "no initialization": ("--no-initialization", 1, ["--no-initialization", "--load"]),
    "recompute modules": (
        "--recompute-granularity selective --recompute-modules everything",
        1,
        ["--recompute-modules everything", "core_attn, layernorm"],
    ),
    "min lr": ("--min-lr 1", 1, ["--min-lr 1.0", "--lr 0.001"]),
    "warm-up": ("--lr-warmup-iters 10", 1, ["--lr-warmup-iters 10", "below the 10 iters"]),
    "two warm-ups": (
        "--lr-warmup-iters 1 --lr-warmup-fraction 0.1",
        1,
        ["--lr-warmup-fraction 0.1", "--lr-warmup-iters 1"],
    ),
    "wsd": ("--lr-decay-style WSD", 1, ["--lr-wsd-decay-iters"]),
    "samples and iterations": ("--train-samples 10", 1, ["--train-samples", "--train-iters"]),
    "rampup": ("--rampup-batch-size 2 2 10", 1, ["--rampup-batch-size", "--train-samples"]),
    "weight decay": ("--start-weight-decay 0.1", 1, ["--weight-decay-incr-style linear"]),
    "weight decay ends": (
        "--weight-decay-incr-style linear",
        1,
        ["needs --start-weight-decay and --end-weight-decay"],
    ),
    "both schedules": (
        "--override-opt_param-scheduler --use-checkpoint-opt_param-scheduler",
        1,
        ["--override-opt_param-scheduler", "--use-checkpoint-opt_param-scheduler"],
    ),
    "buckets": ("--ddp-num-buckets 2 --ddp-bucket-size 3", 1, ["--ddp-num-buckets"]),
    "eval interval": ("--eval-iters 1", 1, ["missing --eval-interval", "--eval-iters 0"]),
    "two data sources": ("--data-path x", 1, ["--mock-data and --data-path"]),
    "external loader": ("--dataloader-type external", 1, ["single or cyclic"]),
    "split": ("--split 1,x", 1, ["--split '1,x'"]),
    "tokenizer": ("--tokenizer-type TikTokenizer", 1, ["TikTokenizer", "HuggingFaceTokenizer"]),
    "vocabulary size": ("--tokenizer-type NullTokenizer", 1, ["--vocab-size"]),
    "tokenizer file": (
        "--tokenizer-type Llama2Tokenizer --tokenizer-model /no/such",
        1,
        ["--tokenizer-model /no/such: no such file"],
    ),
    "save interval": ("--save /tmp/x", 1, ["--save /tmp/x", "--save-interval"]),
    "retain": (
        "--save /tmp/x --save-interval 4 --save-retain-interval 6",
        1,
        ["--save-retain-interval 6", "--save-interval 4"],
    ),
    "format": ("--ckpt-format torch", 1, ["--ckpt-format torch", "torch_dist"]),
    "step": ("--ckpt-step 5", 1, ["--ckpt-step needs --load"]),
    "missing checkpoint": (
        "--load /no/such --exit-on-missing-checkpoint",
        1,
        ["--load /no/such"],
    ),
    "checkpoint args": ("--use-checkpoint-args", 1, ["--use-checkpoint-args needs --load"]),
    "negative": ("--exit-interval 0", 1, ["--exit-interval 0", "at least 1"]),
}


@pytest.mark.parametrize("case", BAD)
def test_inconsistent_flags_are_refused_with_names_and_numbers(case: str) -> None:
    flags, world_size, fragments = BAD[case]

    text = message(PLAIN + flags, world_size)

    assert [fragment for fragment in fragments if fragment not in text] == [], text


@pytest.mark.parametrize(
    ("flags", "fragment"),
    [
        ("", "missing --num-layers, --hidden-size"),
        (BASE, "missing --train-iters or --train-samples"),
        (ITERATIONS, "no data: type --data-path"),
        (PLAIN.replace("--lr 1e-3", ""), "missing --lr"),
        (ITERATIONS + "--mock-data", "--tokenizer-type GPT2BPETokenizer (the default)"),
        (REAL + "--data-path /no/such", "/no/such.bin, /no/such.idx"),
        (REAL + "--data-path 0.5 /a 0.5", "by turns"),
        (REAL + "--data-args-path /no/such", "--data-args-path /no/such cannot be read"),
        (UNSPLIT + "--per-split-data-args-path /no/such", "--per-split-data-args-path /no/such"),
        (UNSPLIT + "--train-data-path /no/such", "--train-data-path: no such file"),
        (
            BASE + "--mock-data --tokenizer-type ByteTokenizer --train-samples 9 "
            "--lr-decay-iters 3",
            "--lr-decay-iters does not go with --train-samples: use --lr-decay-samples",
        ),
        (
            BASE + "--mock-data --tokenizer-type ByteTokenizer --train-samples 99 "
            "--global-batch-size 16 --rampup-batch-size 4 5 9",
            "increments that fit: 1, 2, 3, 4, 6, 12",
        ),
        (
            BASE + "--mock-data --tokenizer-type ByteTokenizer --train-samples 99 "
            "--global-batch-size 16 --rampup-batch-size 3 1 9",
            "= 2; values that fit: 2, 4",
        ),
    ],
)
def test_missing_pieces_are_named(flags: str, fragment: str) -> None:
    assert fragment in message(flags)


def test_data_files_that_exist_pass(tmp_path: Path) -> None:
    for name in ("a.bin", "a.idx"):
        (tmp_path / name).touch()

    args = validated(REAL + f"--data-path 1.0 {tmp_path}/a")

    assert args.split == "99,1,0"


def test_split_beside_per_split_paths_is_refused(tmp_path: Path) -> None:
    for name in ("a.bin", "a.idx"):
        (tmp_path / name).touch()

    assert "leave it out" in message(REAL + f"--train-data-path {tmp_path}/a")


def test_blend_file_is_read(tmp_path: Path) -> None:
    (tmp_path / "blend").write_text("0.5 /no/a\n0.5 /no/b\n")

    assert "/no/a.bin, /no/a.idx, /no/b.bin" in message(REAL + f"--data-args-path {tmp_path}/blend")


def test_split_file_without_a_split_is_refused(tmp_path: Path) -> None:
    (tmp_path / "splits.json").write_text('{"train": []}')

    text = message(UNSPLIT + f"--per-split-data-args-path {tmp_path}/splits.json")
    assert "lacks the key 'valid'" in text


def test_defaults_without_a_gpu_are_replaced_with_one_note_each() -> None:
    args = validated(PLAIN + "--position-embedding-type rope")

    assert (args.transformer_impl, args.distributed_backend) == ("local", "gloo")
    assert not args.gradient_accumulation_fusion and not args.masked_softmax_fusion
    assert not args.apply_rope_fusion and args.no_persist_layer_norm
    assert args.bias_gelu_fusion and args.bias_dropout_fusion
    impl, backend, kernels = args.notes
    assert "--transformer-impl local" in impl and "gloo" in backend
    assert "gradient accumulation, masked softmax, persistent LayerNorm, rotary" in kernels


def test_fully_equipped_gpu_keeps_megatron_lm_defaults() -> None:
    args = validated(PLAIN, machine=HOPPER)

    assert (args.transformer_impl, args.distributed_backend) == ("transformer_engine", "nccl")
    assert args.gradient_accumulation_fusion and args.masked_softmax_fusion
    assert not args.no_persist_layer_norm
    assert args.notes == []


def test_gpu_without_transformer_engine_trains_with_the_local_implementation() -> None:
    args = validated(PLAIN, machine=BARE_GPU)

    assert (args.transformer_impl, args.distributed_backend) == ("local", "nccl")
    assert "Transformer Engine is not installed" in args.notes[0]


@pytest.mark.parametrize(("given", "passes"), [(None, False), ("8", False), ("1", True)])
def test_tensor_parallel_on_hopper_wants_one_connection(
    monkeypatch: pytest.MonkeyPatch, given: str | None, passes: bool
) -> None:
    monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS", raising=False)
    if given is not None:
        monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", given)
    flags = PLAIN + "--tensor-model-parallel-size 2"

    if passes:
        assert validated(flags, 2, HOPPER).data_parallel_size == 1
    else:
        assert "CUDA_DEVICE_MAX_CONNECTIONS=1" in message(flags, 2, HOPPER)


def test_deterministic_mode_on_a_gpu_wants_a_reduction_order(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("NCCL_ALGO", raising=False)

    assert "NCCL_ALGO" in message(PLAIN + "--deterministic-mode", machine=HOPPER)


def test_rank_and_local_rank_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("LOCAL_RANK", "1")

    args = validated(PLAIN, world_size=4)

    assert (args.rank, args.local_rank, args.world_size) == (3, 1, 4)


def test_sequence_parallel_without_tensor_parallel_is_turned_off_with_a_note() -> None:
    args = validated(PLAIN + "--sequence-parallel")

    assert args.sequence_parallel is False
    assert any("--sequence-parallel" in note for note in args.notes)


def test_load_of_a_missing_folder_is_a_note() -> None:
    args = validated(PLAIN + "--load /no/such")

    assert any("/no/such" in note and "scratch" in note for note in args.notes)
