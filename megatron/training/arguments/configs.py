"""The config objects of megatron-core that a validated command line stands for."""

from __future__ import annotations

import argparse
import dataclasses
import warnings
from typing import Any

import torch
from megatron.core.activations import squared_relu
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.fusions.fused_bias_geglu import quick_gelu
from megatron.core.optimizer import AdamOptimizerConfig, OptimizerConfig, SGDOptimizerConfig
from megatron.core.transformer import TransformerConfig

from megatron.training.arguments.errors import UsageError

DEFAULT_BUCKET_SIZE = 40_000_000
"""Parameters in a gradient bucket, where neither a size nor a number of buckets is asked for."""
BUCKET_SIZE_PER_RANK = 1_000_000
"""Buckets grow with the data-parallel size, so that a ring's chunks stay large."""


def _fields_from(args: argparse.Namespace, config: type) -> dict[str, Any]:
    return {
        field.name: getattr(args, field.name)
        for field in dataclasses.fields(config)
        if field.init and hasattr(args, field.name)
    }


def _build(config: type, values: dict[str, Any]) -> Any:
    """Make the dataclass; what it finds inconsistent is the user's to mend."""
    try:
        with warnings.catch_warnings():
            # megatron-core repeats on every rank what the notes of validation say once.
            warnings.simplefilter("ignore")
            return config(**values)
    except (ValueError, AssertionError, ImportError, RuntimeError) as error:
        raise UsageError(f"megatron-core refuses this configuration: {error}") from error


def transformer_config_from_args(args: argparse.Namespace) -> TransformerConfig:
    """The model's and the pipeline schedule's configuration, of validated `args`."""
    values = _fields_from(args, TransformerConfig)
    values.update(
        num_moe_experts=args.num_experts,
        num_layers_in_first_pipeline_stage=args.decoder_first_pipeline_num_layers,
        num_layers_in_last_pipeline_stage=args.decoder_last_pipeline_num_layers,
        num_query_groups=args.num_query_groups if args.group_query_attention else None,
        persist_layer_norm=not args.no_persist_layer_norm,
        pipeline_dtype=args.params_dtype,
        batch_p2p_comm=not args.overlap_p2p_comm,
        # gloo sends are asynchronous and would read the freed buffer; a CUDA stream's order is
        # what makes freeing safe.
        deallocate_pipeline_outputs=args.distributed_backend == "nccl",
        cuda_graph_scope=[],
        inference_sampling_seed=args.seed,
        use_cpu_initialization=bool(args.use_cpu_initialization),
        **_activation(args),
    )
    if args.init_method_xavier_uniform:
        values["init_method"] = torch.nn.init.xavier_uniform_
        values["output_layer_init_method"] = torch.nn.init.xavier_uniform_
    if len(args.cp_comm_type) == 1:
        values["cp_comm_type"] = args.cp_comm_type[0]
    return _build(TransformerConfig, values)


def _activation(args: argparse.Namespace) -> dict[str, Any]:
    """The MLP's activation: GeLU unless one of three flags names another."""
    if args.swiglu:
        return {
            "activation_func": torch.nn.functional.silu,
            "gated_linear_unit": True,
            "bias_activation_fusion": args.bias_swiglu_fusion,
        }
    fusion = {"bias_activation_fusion": args.bias_gelu_fusion}
    if args.squared_relu:
        return {"activation_func": squared_relu, **fusion}
    if args.quick_geglu:
        return {"activation_func": quick_gelu, "gated_linear_unit": True, **fusion}
    return fusion


def optimizer_config_from_args(args: argparse.Namespace) -> OptimizerConfig:
    """The optimizer's configuration, of validated `args`."""
    config = SGDOptimizerConfig if args.optimizer == "sgd" else AdamOptimizerConfig
    return _build(config, _fields_from(args, config))


def ddp_config_from_args(
    args: argparse.Namespace, num_parameters: int | None = None
) -> DistributedDataParallelConfig:
    """The data-parallel engine's configuration, of validated `args`.

    `num_parameters`: this rank's, needed with --ddp-num-buckets alone.
    """
    values = _fields_from(args, DistributedDataParallelConfig)
    values.update(
        grad_reduce_in_fp32=args.accumulate_allreduce_grads_in_fp32,
        check_for_nan_in_grad=args.check_for_nan_in_loss_and_grad,
        bucket_size=_bucket_size(args, num_parameters),
        pad_buckets_for_high_nccl_busbw=args.ddp_pad_buckets_for_high_nccl_busbw,
        reduce_scatter_with_fp32_accumulation=args.ddp_reduce_scatter_with_fp32_accumulation,
        average_in_collective=args.ddp_average_in_collective,
    )
    return _build(DistributedDataParallelConfig, values)


def _bucket_size(args: argparse.Namespace, num_parameters: int | None) -> int | None:
    if not args.overlap_grad_reduce:
        return None
    if args.ddp_num_buckets is not None:
        if num_parameters is None:
            raise AssertionError("--ddp-num-buckets needs the number of parameters")
        return num_parameters // args.ddp_num_buckets
    if args.ddp_bucket_size is not None:
        return int(args.ddp_bucket_size)
    num_replicas = args.data_parallel_size * args.context_parallel_size
    return max(DEFAULT_BUCKET_SIZE, BUCKET_SIZE_PER_RANK * num_replicas)
