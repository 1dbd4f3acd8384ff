"""The GPT of a run: layer specification, chunks of the pipeline, precision and data parallelism."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable
from typing import Any

import torch
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.enums import ModelType
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_decoder_block_spec,
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import Float16Module

from megatron.training import device
from megatron.training.output import print_line, print_rank_0


def build_model(
    args: Namespace,
    config: TransformerConfig,
    make_ddp_config: Callable[[Namespace, int], DistributedDataParallelConfig] | None,
) -> list[Any]:
    """This rank's model chunks, one per virtual pipeline stage.

    Wrapped for half precision when the flags say so and, unless `make_ddp_config` (of arguments and
    number of parameters) is None, for data parallelism. Every rank calls it; collectives in it only
    copy weights whose value a joining process replaces.
    """
    print_rank_0("building GPT model ...")
    chunks: list[Any] = _build_chunks(args, config)
    num_parameters = _announce_size(chunks)
    for chunk in chunks:
        for parameter in chunk.parameters():
            tensor_parallel.set_defaults_if_not_set_tensor_model_parallel_attributes(parameter)
        chunk.to(device.device())
    if args.fp16 or args.bf16:
        chunks = [Float16Module(config, chunk) for chunk in chunks]
    if make_ddp_config is None:
        return chunks
    chunks = _wrap_data_parallel(args, config, make_ddp_config(args, num_parameters), chunks)
    if args.data_parallel_random_init:
        for chunk in chunks:
            chunk.broadcast_params()
    return chunks


def unwrap(chunk: Any) -> GPTModel:
    """The GPTModel inside its wrappers."""
    while not isinstance(chunk, GPTModel):
        chunk = chunk.module
    return chunk


def embedding_ranks(args: Namespace, pipeline_ranks: list[int]) -> list[int]:
    """The ranks of a pipeline that hold a copy of the word embedding."""
    first, last = pipeline_ranks[0], pipeline_ranks[-1]
    if first == last or args.untie_embeddings_and_output_weights:
        return [first]
    return [first, last]


def _build_chunks(args: Namespace, config: TransformerConfig) -> list[Any]:
    num_stages = parallel_state.get_pipeline_model_parallel_world_size()
    num_virtual = args.virtual_pipeline_model_parallel_size
    stages: list[int | None] = [None]
    if num_stages > 1 and num_virtual is not None:
        stages = list(range(num_virtual))
    chunks = []
    for stage in stages:
        chunk = _build_gpt(args, config, stage)
        chunk.model_type = ModelType.encoder_or_decoder
        if stage is not None:
            chunk.vp_stage = stage
        chunks.append(chunk)
    return chunks


def _build_gpt(args: Namespace, config: TransformerConfig, vp_stage: int | None) -> GPTModel:
    first = parallel_state.is_pipeline_first_stage(
        ignore_virtual=vp_stage is None, vp_stage=vp_stage
    )
    last = parallel_state.is_pipeline_last_stage(ignore_virtual=vp_stage is None, vp_stage=vp_stage)
    return GPTModel(
        config=config,
        transformer_layer_spec=layer_spec(args, config, vp_stage),
        vocab_size=args.padded_vocab_size,
        max_sequence_length=args.max_position_embeddings,
        pre_process=first,
        post_process=last,
        fp16_lm_cross_entropy=args.fp16_lm_cross_entropy,
        parallel_output=True,
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
        position_embedding_type=args.position_embedding_type,
        rotary_percent=args.rotary_percent,
        rotary_base=args.rotary_base,
        rope_scaling=args.use_rope_scaling,
        vp_stage=vp_stage,
    )


def layer_spec(args: Namespace, config: TransformerConfig, vp_stage: int | None = None) -> Any:
    """Which modules make a transformer layer, for the implementation the flags name."""
    on_te = args.transformer_impl == "transformer_engine"
    if args.num_experts:
        return get_gpt_decoder_block_spec(
            config,
            use_transformer_engine=on_te,
            normalization=args.normalization,
            qk_l2_norm=args.qk_l2_norm,
            vp_stage=vp_stage,
        )
    if on_te:
        return get_gpt_layer_with_transformer_engine_spec(
            args.num_experts,
            args.moe_grouped_gemm,
            args.qk_layernorm,
            args.multi_latent_attention,
            qk_l2_norm=args.qk_l2_norm,
        )
    return get_gpt_layer_local_spec(
        args.num_experts,
        args.moe_grouped_gemm,
        args.qk_layernorm,
        args.multi_latent_attention,
        normalization=args.normalization,
    )


def _announce_size(chunks: list[Any]) -> int:
    num_parameters = sum(p.nelement() for chunk in chunks for p in chunk.parameters())
    if parallel_state.get_data_parallel_rank(with_context_parallel=True) == 0:
        tensor_rank = parallel_state.get_tensor_model_parallel_rank()
        pipeline_rank = parallel_state.get_pipeline_model_parallel_rank()
        print_line(
            " > number of parameters on (tensor, pipeline) model parallel rank "
            f"({tensor_rank}, {pipeline_rank}): {num_parameters}"
        )
    return num_parameters


def _wrap_data_parallel(
    args: Namespace,
    config: TransformerConfig,
    ddp_config: DistributedDataParallelConfig,
    chunks: list[Any],
) -> list[Any]:
    # Buffers are allocated on a side stream that the main stream then waits for, so that a CUDA
    # graph captured later does not see the allocation.
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        wrapped = [
            DistributedDataParallel(
                config=config,
                ddp_config=ddp_config,
                module=chunk,
                # Later chunks' communication overlaps with compute without being cut in buckets.
                disable_bucketing=index > 0
                or getattr(args, "overlap_param_gather_with_optimizer_step", False),
            )
            for index, chunk in enumerate(chunks)
        ]
    torch.cuda.current_stream().wait_stream(side)
    return wrapped
