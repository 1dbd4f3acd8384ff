"""Rules about how ranks are arranged, and the sizes that follow from it."""

from __future__ import annotations

import argparse
import math
import os

from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout

from megatron.training.arguments.errors import UsageError
from megatron.training.arguments.machine import Machine

SIZES = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "context_parallel_size",
    "expert_model_parallel_size",
)


def divisors(number: int) -> str:
    """`1, 2, 3, 6` for 6."""
    return ", ".join(str(d) for d in range(1, number + 1) if number % d == 0)


def multiples(number: int, *, count: int = 4, around: int = 0) -> str:
    """The first multiples of `number`, starting near `around`."""
    first = max(1, around // number)
    return ", ".join(str(number * k) for k in range(first, first + count))


def check_world(args: argparse.Namespace, world_size: int) -> None:
    """The grid fills the world; sets `data_parallel_size`."""
    for size in SIZES:
        given = getattr(args, size)
        if given < 1:
            raise UsageError(f"--{size.replace('_', '-')} {given}: must be at least 1")
    tensor, pipeline = args.tensor_model_parallel_size, args.pipeline_model_parallel_size
    context = args.context_parallel_size
    model = tensor * pipeline * context
    if world_size % model:
        raise UsageError(
            f"world size {world_size} does not divide into models of --tensor-model-parallel-size "
            f"{tensor} x --pipeline-model-parallel-size {pipeline} x --context-parallel-size "
            f"{context} = {model} ranks; world sizes that fit: "
            f"{multiples(model, around=world_size)}; products that fit {world_size} ranks: "
            f"{divisors(world_size)}"
        )
    if args.expert_tensor_parallel_size is None:
        args.expert_tensor_parallel_size = tensor
    expert = args.expert_tensor_parallel_size * args.expert_model_parallel_size * pipeline
    if world_size % expert:
        raise UsageError(
            f"world size {world_size} does not divide into --expert-model-parallel-size "
            f"{args.expert_model_parallel_size} x --expert-tensor-parallel-size "
            f"{args.expert_tensor_parallel_size} x --pipeline-model-parallel-size {pipeline} = "
            f"{expert} ranks; world sizes that fit: "
            f"{multiples(math.lcm(model, expert), around=world_size)}"
        )
    args.world_size = world_size
    args.rank = int(os.environ.get("RANK") or 0)
    args.local_rank = int(os.environ.get("LOCAL_RANK") or args.local_rank)
    args.data_parallel_size = world_size // model
    args.transformer_pipeline_model_parallel_size = pipeline


def check_pipeline(args: argparse.Namespace) -> None:
    """Layers divide among stages; sets `virtual_pipeline_model_parallel_size`."""
    chosen = [
        name
        for name in (
            "num_layers_per_virtual_pipeline_stage",
            "num_virtual_stages_per_pipeline_rank",
            "pipeline_model_parallel_layout",
        )
        if getattr(args, name) is not None
    ]
    if len(chosen) > 1:
        flags = " and ".join(f"--{name.replace('_', '-')}" for name in chosen)
        raise UsageError(f"{flags} say the same thing in different ways; keep one of them")
    for name in chosen:
        given = getattr(args, name)
        if isinstance(given, int) and given < 1:
            raise UsageError(f"--{name.replace('_', '-')} {given}: must be at least 1")
    virtual = _virtual_size(args)
    args.virtual_pipeline_model_parallel_size = virtual if virtual > 1 else None
    _check_overlap_p2p(args)


def _virtual_size(args: argparse.Namespace) -> int:
    pipeline = args.pipeline_model_parallel_size
    if args.pipeline_model_parallel_layout is not None:
        return _virtual_size_of_layout(args)
    uneven = (
        args.decoder_first_pipeline_num_layers is not None
        or args.decoder_last_pipeline_num_layers is not None
    )
    virtual = args.num_virtual_stages_per_pipeline_rank
    if virtual is not None:
        if not uneven and _num_slots(args) % (pipeline * virtual):
            raise UsageError(
                f"{_slots_in_words(args)} do not divide among --pipeline-model-parallel-size "
                f"{pipeline} x --num-virtual-stages-per-pipeline-rank {virtual} = "
                f"{pipeline * virtual} chunks; --num-layers that fit: "
                f"{_fitting_layers(args, pipeline * virtual)}"
            )
        return int(virtual)
    if uneven:
        if args.num_layers_per_virtual_pipeline_stage is not None:
            raise UsageError(
                "--num-layers-per-virtual-pipeline-stage goes with equal stages only; beside "
                "--decoder-first-pipeline-num-layers or --decoder-last-pipeline-num-layers use "
                "--num-virtual-stages-per-pipeline-rank"
            )
        _check_uneven_stages(args)
        return 1
    return _virtual_size_of_equal_stages(args)


def _virtual_size_of_equal_stages(args: argparse.Namespace) -> int:
    pipeline = args.pipeline_model_parallel_size
    if _num_slots(args) % pipeline:
        raise UsageError(
            f"{_slots_in_words(args)} do not divide among --pipeline-model-parallel-size "
            f"{pipeline}; --num-layers that fit: {_fitting_layers(args, pipeline)}; "
            f"or pipeline sizes: {divisors(_num_slots(args))}"
        )
    per_stage = _num_slots(args) // pipeline
    per_chunk = args.num_layers_per_virtual_pipeline_stage
    if per_chunk is None:
        return 1
    if per_stage % per_chunk:
        raise UsageError(
            f"--num-layers-per-virtual-pipeline-stage {per_chunk} does not divide the {per_stage} "
            f"layers of a pipeline stage; values that fit: {divisors(per_stage)}"
        )
    return int(per_stage // per_chunk)


def _virtual_size_of_layout(args: argparse.Namespace) -> int:
    pipeline = args.pipeline_model_parallel_size
    try:
        stages = PipelineParallelLayerLayout.get_num_stages_from_str(
            args.pipeline_model_parallel_layout
        )
    except (AssertionError, ValueError) as error:
        raise _bad_layout(args, error) from error
    if stages % pipeline:
        raise UsageError(
            f"--pipeline-model-parallel-layout has {stages} stages, which do not divide among "
            f"--pipeline-model-parallel-size {pipeline}; numbers of stages that fit: "
            f"{multiples(pipeline, around=stages)}"
        )
    try:
        layout = PipelineParallelLayerLayout.from_str(
            layout=args.pipeline_model_parallel_layout, pipeline_model_parallel_size=pipeline
        )
        layout.validate_layer_layout(num_layers=args.num_layers, mtp_num_layers=None)
    except (AssertionError, ValueError) as error:
        raise _bad_layout(args, error) from error
    return int(stages // pipeline)


def _bad_layout(args: argparse.Namespace, error: Exception) -> UsageError:
    given = args.pipeline_model_parallel_layout
    return UsageError(
        f"--pipeline-model-parallel-layout {given!r} does not fit --num-layers {args.num_layers}, "
        f"says megatron-core: {error}"
    )


def _num_slots(args: argparse.Namespace) -> int:
    """Layers, and the embedding and loss where they count as a layer each."""
    embedding, loss = (
        args.account_for_embedding_in_pipeline_split,
        args.account_for_loss_in_pipeline_split,
    )
    return int(args.num_layers + embedding + loss)


def _slots_in_words(args: argparse.Namespace) -> str:
    extra = _num_slots(args) - args.num_layers
    if not extra:
        return f"--num-layers {args.num_layers}"
    return f"--num-layers {args.num_layers} and {extra} for embedding and loss"


def _fitting_layers(args: argparse.Namespace, divisor: int) -> str:
    extra = _num_slots(args) - args.num_layers
    first = max(1 + extra // divisor, _num_slots(args) // divisor)
    return ", ".join(str(divisor * k - extra) for k in range(first, first + 4))


def _check_uneven_stages(args: argparse.Namespace) -> None:
    ends = [
        count
        for count in (
            args.decoder_first_pipeline_num_layers,
            args.decoder_last_pipeline_num_layers,
        )
        if count is not None
    ]
    middle = args.pipeline_model_parallel_size - len(ends)
    rest = _num_slots(args) - sum(ends)
    fits = rest >= 0 and (rest == 0 if middle == 0 else middle > 0 and rest % middle == 0)
    if not fits:
        raise UsageError(
            f"--decoder-first-pipeline-num-layers and --decoder-last-pipeline-num-layers take "
            f"{sum(ends)} of {_num_slots(args)} layers, and the remaining {rest} do not divide "
            f"among the other {middle} pipeline stages"
        )


def _check_overlap_p2p(args: argparse.Namespace) -> None:
    pipeline = args.pipeline_model_parallel_size
    if args.virtual_pipeline_model_parallel_size is None:
        # Only the interleaved schedule overlaps its sends; Megatron-LM clears these two as well.
        args.overlap_p2p_comm = False
        args.align_param_gather = False
        return
    least = 2 if args.overlap_p2p_comm else 3
    if pipeline < least:
        without = "" if args.overlap_p2p_comm else " with --no-overlap-p2p-communication"
        raise UsageError(
            f"the interleaved pipeline schedule{without} needs --pipeline-model-parallel-size "
            f"{least} or more, given {pipeline}"
        )


def check_overlap(args: argparse.Namespace) -> None:
    """Overlap of gradient reduction and parameter gathering."""
    if not args.overlap_param_gather:
        return
    if not args.use_distributed_optimizer:
        raise UsageError("--overlap-param-gather needs --use-distributed-optimizer: add it")
    if not args.overlap_grad_reduce:
        raise UsageError("--overlap-param-gather needs --overlap-grad-reduce: add it")


def check_sequence_parallel(args: argparse.Namespace) -> None:
    """Sequence parallelism divides a sequence among tensor-parallel ranks."""
    if args.sequence_parallel and args.tensor_model_parallel_size == 1:
        args.sequence_parallel = False
        args.notes.append(
            "--sequence-parallel has no effect with --tensor-model-parallel-size 1: turned off"
        )
    ranks = args.tensor_model_parallel_size * args.context_parallel_size
    if args.sequence_parallel and args.seq_length % ranks:
        raise UsageError(
            f"--seq-length {args.seq_length} does not divide by --tensor-model-parallel-size x "
            f"--context-parallel-size = {ranks}, as --sequence-parallel needs; lengths that fit: "
            f"{multiples(ranks, around=args.seq_length)}"
        )


def check_context_parallel(args: argparse.Namespace) -> None:
    """Context parallelism cuts each sequence in two pieces a rank."""
    context = args.context_parallel_size
    if context == 1:
        return
    if args.transformer_impl != "transformer_engine":
        raise UsageError(
            f"--context-parallel-size {context} needs the attention of Transformer Engine: use "
            "--transformer-impl transformer_engine on a GPU, or --context-parallel-size 1"
        )
    if args.seq_length % (2 * context):
        raise UsageError(
            f"--seq-length {args.seq_length} does not divide by 2 x --context-parallel-size "
            f"{context} = {2 * context}; lengths that fit: "
            f"{multiples(2 * context, around=args.seq_length)}"
        )
    if "a2a+p2p" in args.cp_comm_type:
        raise UsageError("--cp-comm-type a2a+p2p is not supported: use p2p, a2a or all_gather")


def check_connections(args: argparse.Namespace, machine: Machine) -> None:
    """Before Blackwell, overlapping tensor or context parallelism relies on one work queue."""
    if not machine.has_gpu or machine.device_generation >= 10:
        return
    if args.tensor_model_parallel_size == 1 and args.context_parallel_size == 1:
        return
    given = os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS")
    if given != "1":
        raise UsageError(
            "--tensor-model-parallel-size or --context-parallel-size above 1 needs "
            "CUDA_DEVICE_MAX_CONNECTIONS=1 in the environment on this GPU, given "
            f"{given if given is not None else 'nothing'}"
        )
