"""Defaults that a machine cannot honour: replaced with a note, or refused if they were typed."""

from __future__ import annotations

import argparse

from megatron.training.arguments.errors import UsageError
from megatron.training.arguments.machine import Machine
from megatron.training.arguments.requirements import norms_are_fused


def adapt_to_machine(args: argparse.Namespace, machine: Machine) -> None:
    """Choose what this machine can run where the user did not, one note a choice.

    Fusions that are plain PyTorch code (bias with GeLU, SwiGLU or dropout) stay as they are on
    every machine: they change results in the last digits.
    """
    _choose_implementation(args, machine)
    _choose_backend(args, machine)
    _choose_fusions(args, machine)


def _choose_implementation(args: argparse.Namespace, machine: Machine) -> None:
    if args.transformer_impl == "inference_optimized":
        raise UsageError(
            "--transformer-impl inference_optimized is for inference; for training use local or "
            "transformer_engine"
        )
    if args.transformer_impl != "transformer_engine" or machine.transformer_engine is not None:
        return
    lacks = "Transformer Engine is not installed" if machine.has_gpu else "there is no GPU"
    if "transformer_impl" in args.typed:
        raise UsageError(
            f"--transformer-impl transformer_engine cannot run here: {lacks}; use "
            "--transformer-impl local"
        )
    args.transformer_impl = "local"
    args.notes.append(f"using --transformer-impl local: {lacks}")


def _choose_backend(args: argparse.Namespace, machine: Machine) -> None:
    if args.distributed_backend != "nccl" or machine.has_gpu:
        return
    if "distributed_backend" in args.typed:
        raise UsageError(
            "--distributed-backend nccl needs a GPU and there is none here; use "
            "--distributed-backend gloo"
        )
    args.distributed_backend = "gloo"
    args.notes.append("using --distributed-backend gloo: there is no GPU")


def _choose_fusions(args: argparse.Namespace, machine: Machine) -> None:
    engine = args.transformer_impl == "transformer_engine"
    off = []
    if args.gradient_accumulation_fusion and not machine.apex_weight_gradient:
        args.gradient_accumulation_fusion = False
        off.append("gradient accumulation")
    if args.masked_softmax_fusion and not (engine or machine.apex_softmax):
        args.masked_softmax_fusion = False
        off.append("masked softmax")
    if not args.no_persist_layer_norm and not norms_are_fused(args, machine):
        args.no_persist_layer_norm = True
        off.append("persistent LayerNorm")
    rotary = args.position_embedding_type == "rope" or args.use_rotary_position_embeddings
    has_rope_kernel = machine.transformer_engine is not None or machine.apex_rope
    if args.apply_rope_fusion and not has_rope_kernel:
        args.apply_rope_fusion = False
        if rotary:
            off.append("rotary embedding")
    if off:
        args.notes.append(f"fused kernels not available here and left out: {', '.join(off)}")
