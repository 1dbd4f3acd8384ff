"""The budget of a job from its validated Megatron flags, and its refusal where it does not fit."""

from __future__ import annotations

import dataclasses
import os
from typing import Any

from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.enums import LayerType
from megatron.core.transformer.transformer_block import get_num_layers_to_build

from deadpool.budget import (
    Chunk,
    Experts,
    ModelShape,
    NodeNeed,
    Sharding,
    count_parameters,
    node_needs,
    snapshot_bytes,
)
from deadpool.config import NODES_HERE, RankEnvironment
from deadpool.node_memory import (
    RESERVE_BYTES,
    RESERVE_BYTES_CUDA,
    file_size_limit,
    read_text,
    refusal,
    tightest,
)
from deadpool.protocol.placement import Grid, choose_holders
from megatron.training.arguments import (
    UsageError,
    ddp_config_from_args,
    transformer_config_from_args,
)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """What a job's snapshots take."""

    grid: Grid
    sizes: tuple[int, ...]
    """Payload bytes by slot."""
    needs: tuple[NodeNeed, ...]
    """By place."""


def check_memory(args: Any) -> None:
    """Raise UsageError where this machine lacks the host memory for its part of the job.

    args: validated, with `padded_vocab_size`. The environment is a launcher's or Slurm's; where
    there is neither, nothing is checked.
    """
    if not os.environ.get("DEADPOOL_NODE") and not os.environ.get("SLURM_NODEID"):
        return
    environment = RankEnvironment.from_environ(args.deadpool_spare_nodes)
    budget = budget_of(args, environment.ranks_per_node)
    reason = refusal(
        budget.grid,
        budget.needs,
        budget.sizes,
        num_nodes_here=int(os.environ.get(NODES_HERE) or 1),
        memory=tightest(read_text),
        file_size=file_size_limit(),
        is_distributed=args.use_distributed_optimizer,
    )
    if reason is not None:
        raise UsageError(reason)


def budget_of(args: Any, ranks_per_node: int) -> Budget:
    """Of validated `args` with `padded_vocab_size`."""
    shape = model_shape(args)
    sharding = sharding_of(args, shape, ranks_per_node)
    sizes = snapshot_bytes(shape, sharding)
    on_gpu = args.distributed_backend == "nccl"
    needs = node_needs(
        sharding.grid,
        sizes,
        choose_holders(sharding.grid, args.deadpool_replicas),
        reserve_bytes_per_rank=RESERVE_BYTES_CUDA if on_gpu else RESERVE_BYTES,
    )
    return Budget(grid=sharding.grid, sizes=sizes, needs=needs)


def model_shape(args: Any) -> ModelShape:
    """Of validated `args` with `padded_vocab_size`."""
    config = transformer_config_from_args(args)
    is_learned = args.position_embedding_type == "learned_absolute"
    return ModelShape(
        hidden_size=args.hidden_size,
        num_attention_heads=args.num_attention_heads,
        num_query_groups=config.num_query_groups or args.num_attention_heads,
        kv_channels=args.kv_channels,
        ffn_hidden_size=args.ffn_hidden_size,
        is_gated=config.gated_linear_unit,
        padded_vocab_size=args.padded_vocab_size,
        num_positions=args.max_position_embeddings if is_learned else 0,
        has_bias=args.add_bias_linear,
        has_qkv_bias=args.add_bias_linear or args.add_qkv_bias,
        norm_has_bias=args.normalization == "LayerNorm",
        has_qk_norm=args.qk_layernorm,
        has_output_gate=args.attention_output_gate,
        has_softmax_offset=args.softmax_type == "learnable",
        ties_embeddings=not args.untie_embeddings_and_output_weights,
        experts=_experts(args, config),
        stages=_stages(args, config),
        parameter_bytes=args.params_dtype.itemsize,
    )


def _experts(args: Any, config: TransformerConfig) -> Experts | None:
    if not args.num_experts:
        return None
    pattern = config.moe_layer_freq
    if isinstance(pattern, int):
        layers = tuple(layer % pattern == 0 for layer in range(args.num_layers))
    else:
        layers = tuple(map(bool, pattern))
    kinds, weights = config.moe_router_load_balancing_type, config.moe_aux_loss_coeff
    if isinstance(kinds, str):
        kinds, weights = [kinds], [weights]
    average = dict(zip(kinds, weights, strict=True)).get("global_aux_loss", 0)
    return Experts(
        num_experts=args.num_experts,
        layers=layers,
        ffn_hidden_size=args.moe_ffn_hidden_size,
        latent_size=args.moe_latent_size or 0,
        shared_ffn_hidden_size=args.moe_shared_expert_intermediate_size or 0,
        has_shared_gate=config.moe_shared_expert_gate,
        counts_tokens=config.moe_router_enable_expert_bias,
        averages_tokens=average > 0,
    )


def _stages(args: Any, config: TransformerConfig) -> tuple[tuple[Chunk, ...], ...]:
    """Layers are dealt to the first chunk of every stage, then to the second."""
    pipeline = args.pipeline_model_parallel_size
    virtual = (args.virtual_pipeline_model_parallel_size or 1) if pipeline > 1 else 1
    stages: list[list[Chunk]] = [[] for _ in range(pipeline)]
    first = 0
    for chunk in range(virtual):
        for stage in range(pipeline):
            layers = range(first, first + _num_layers(config, chunk, stage))
            stages[stage].append(
                Chunk(
                    layers=layers,
                    has_embedding=stage == chunk == 0,
                    has_output=(stage, chunk) == (pipeline - 1, virtual - 1),
                )
            )
            first = layers.stop
    return tuple(map(tuple, stages))


def _num_layers(config: TransformerConfig, chunk: int, stage: int) -> int:
    layout = config.pipeline_model_parallel_layout
    if layout is not None:  # megatron-core 0.16.1 looks up the stage in the groups there.
        return layout.layout[stage][chunk].count(LayerType.decoder)
    virtual = config.virtual_pipeline_model_parallel_size
    return get_num_layers_to_build(config, chunk if virtual is not None else None, stage)


def sharding_of(args: Any, shape: ModelShape, ranks_per_node: int) -> Sharding:
    """Of validated `args`."""
    model_ranks = (
        args.tensor_model_parallel_size
        * args.context_parallel_size
        * args.pipeline_model_parallel_size
    )
    grid = Grid(
        world_size=args.data_parallel_size * model_ranks,
        ranks_per_node=ranks_per_node,
        tensor=args.tensor_model_parallel_size,
        context=args.context_parallel_size,
        pipeline=args.pipeline_model_parallel_size,
        pipeline_before_data=args.use_tp_pp_dp_mapping,
    )
    unbucketed = Sharding(
        grid=grid,
        expert=args.expert_model_parallel_size,
        expert_tensor=args.expert_tensor_parallel_size,
        is_distributed=args.use_distributed_optimizer,
        bucket_size=None,
        pads_for_busbw=args.ddp_pad_buckets_for_high_nccl_busbw,
        element_bytes=_element_bytes(args),
        num_scalars=int(args.optimizer == "adam"),
    )
    ddp_config = ddp_config_from_args(args, count_parameters(shape, unbucketed, 0))
    return dataclasses.replace(unbucketed, bucket_size=ddp_config.bucket_size)


def _element_bytes(args: Any) -> tuple[int, ...]:
    """Of the main parameter and of each tensor in the optimizer's state."""
    if args.optimizer == "sgd":
        return (4, 4) if args.sgd_momentum else (4,)
    if args.use_precision_aware_optimizer:  # Its parameters are the model's, the main ones state.
        kinds = (args.main_params_dtype, args.exp_avg_dtype, args.exp_avg_sq_dtype)
        return (args.params_dtype.itemsize, *(kind.itemsize for kind in kinds))
    return (4, 4, 4)
