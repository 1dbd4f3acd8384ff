"""Rules about the model's shape, and the sizes that follow from it."""

from __future__ import annotations

import argparse

from megatron.training.arguments.errors import UsageError
from megatron.training.arguments.rules_parallel import divisors, multiples

RECOMPUTABLE = ("core_attn", "layernorm", "mlp", "moe", "moe_act", "shared_experts")
"""What --recompute-modules takes."""
SWIGLU_MULTIPLE = 64
"""A derived SwiGLU width is a multiple of this."""


def check_required(args: argparse.Namespace) -> None:
    """The flags no model goes without."""
    required = (
        "num_layers",
        "hidden_size",
        "num_attention_heads",
        "seq_length",
        "max_position_embeddings",
        "micro_batch_size",
    )
    missing = [f"--{name.replace('_', '-')}" for name in required if getattr(args, name) is None]
    if missing:
        raise UsageError(f"missing {', '.join(missing)}: each needs a positive number")
    for name in (*required, "global_batch_size", "ffn_hidden_size", "kv_channels"):
        given = getattr(args, name)
        if given is not None and given < 1:
            raise UsageError(f"--{name.replace('_', '-')} {given}: must be at least 1")
    args.encoder_num_layers = args.num_layers
    args.encoder_seq_length = args.seq_length


def check_shape(args: argparse.Namespace) -> None:
    """Heads, widths and positions; sets `ffn_hidden_size` and `kv_channels`."""
    _check_activation(args)
    if args.ffn_hidden_size is None:
        args.ffn_hidden_size = _default_ffn_hidden_size(args)
    heads, tensor = args.num_attention_heads, args.tensor_model_parallel_size
    if args.kv_channels is None:
        if args.hidden_size % heads:
            raise UsageError(
                f"--hidden-size {args.hidden_size} does not divide among --num-attention-heads "
                f"{heads}; hidden sizes that fit: {multiples(heads, around=args.hidden_size)}; "
                f"numbers of heads: {divisors(args.hidden_size)}; or set --kv-channels"
            )
        args.kv_channels = args.hidden_size // heads
    if heads % tensor:
        raise UsageError(
            f"--num-attention-heads {heads} do not divide among --tensor-model-parallel-size "
            f"{tensor}; numbers of heads that fit: {multiples(tensor, around=heads)}; "
            f"tensor sizes: {divisors(heads)}"
        )
    _check_ffn(args)
    _check_query_groups(args)
    _check_positions(args)


def _check_ffn(args: argparse.Namespace) -> None:
    width, tensor = args.ffn_hidden_size, args.tensor_model_parallel_size
    if width < 1:
        raise UsageError(
            f"--hidden-size {args.hidden_size} with --swiglu derives an MLP of width {width}: "
            "type --ffn-hidden-size"
        )
    if width % tensor and not (args.num_experts and args.moe_layer_freq == 1):
        raise UsageError(
            f"--ffn-hidden-size {width} does not divide among --tensor-model-parallel-size "
            f"{tensor}; widths that fit: {multiples(tensor, around=width)}"
        )


def _check_activation(args: argparse.Namespace) -> None:
    names = ("swiglu", "squared_relu", "quick_geglu")
    chosen = [f"--{name.replace('_', '-')}" for name in names if getattr(args, name)]
    if len(chosen) > 1:
        raise UsageError(f"{' and '.join(chosen)} name different activations: keep one of them")
    if not args.add_bias_linear:
        args.bias_gelu_fusion = False
    else:
        args.add_qkv_bias = True
    _leave_out_bias_fusion(args)


def _leave_out_bias_fusion(args: argparse.Namespace) -> None:
    """megatron-core fuses the bias with GeLU in dense layers, with quick GeGLU in experts."""
    has_experts = bool(args.num_experts)
    has_dense = not has_experts or args.moe_layer_freq != 1
    without = {
        "--squared-relu": args.squared_relu,
        "--quick-geglu in dense layers": args.quick_geglu and has_dense,
        "GeLU in experts": has_experts and not (args.swiglu or args.quick_geglu),
    }
    for name, applies in without.items():
        if applies and args.bias_gelu_fusion and not args.swiglu:
            args.bias_gelu_fusion = False
            args.notes.append(f"megatron-core cannot fuse the bias with {name}: not fused")


def _default_ffn_hidden_size(args: argparse.Namespace) -> int:
    if not args.swiglu:
        return int(4 * args.hidden_size)
    # A gated MLP has three matrices instead of two: two thirds of the width keep the size.
    return int((4 * args.hidden_size * 2 / 3) / SWIGLU_MULTIPLE) * SWIGLU_MULTIPLE


def _check_query_groups(args: argparse.Namespace) -> None:
    if not args.group_query_attention:
        if "num_query_groups" in args.typed:
            raise UsageError(
                f"--num-query-groups {args.num_query_groups} needs --group-query-attention: add it"
            )
        return
    groups, heads = args.num_query_groups, args.num_attention_heads
    tensor = args.tensor_model_parallel_size
    if groups < 1 or heads % groups:
        raise UsageError(
            f"--num-query-groups {groups} does not divide --num-attention-heads {heads}; "
            f"numbers that fit: {divisors(heads)}"
        )
    if groups % tensor and tensor % groups:
        fits = [
            str(g) for g in range(1, heads + 1) if not heads % g and not min(g % tensor, tensor % g)
        ]
        raise UsageError(
            f"--num-query-groups {groups} and --tensor-model-parallel-size {tensor}: one must "
            f"divide the other; numbers of groups that fit: {', '.join(fits)}"
        )


def _check_positions(args: argparse.Namespace) -> None:
    if args.seq_length > args.max_position_embeddings:
        raise UsageError(
            f"--seq-length {args.seq_length} is longer than --max-position-embeddings "
            f"{args.max_position_embeddings}: lower the first or raise the second to at least "
            f"{args.seq_length}"
        )
    if args.use_rotary_position_embeddings:
        args.position_embedding_type = "rope"
    kind = args.position_embedding_type
    if kind in ("mrope", "relative"):
        raise UsageError(
            f"--position-embedding-type {kind} is not supported: use learned_absolute, rope or none"
        )
    if args.rope_type == "yarn":
        raise UsageError("--rope-type yarn is not supported: use rope")
    if not args.add_position_embedding and kind != "rope":
        raise UsageError(
            f"--no-position-embedding does not go with --position-embedding-type {kind}: "
            "leave it out and type --position-embedding-type none or rope"
        )
    if kind != "rope":
        args.apply_rope_fusion = False
    elif not 0 < args.rotary_percent <= 1:
        raise UsageError(f"--rotary-percent {args.rotary_percent}: must be above 0 and at most 1")


def check_recompute(args: argparse.Namespace) -> None:
    """Recomputing activations: granularity, method and number of layers fit together."""
    if args.recompute_activations:
        if args.recompute_granularity == "full":
            raise UsageError(
                "--recompute-activations means --recompute-granularity selective, given full: "
                "keep one of them"
            )
        args.recompute_granularity = "selective"
    unknown = sorted(set(args.recompute_modules or ()) - set(RECOMPUTABLE))
    if unknown:
        raise UsageError(
            f"--recompute-modules {' '.join(unknown)}: choose among {', '.join(RECOMPUTABLE)}"
        )
    granularity = args.recompute_granularity
    if granularity != "full":
        for name in ("recompute_method", "recompute_num_layers"):
            if getattr(args, name) is not None:
                raise UsageError(
                    f"--{name.replace('_', '-')} {getattr(args, name)} needs "
                    f"--recompute-granularity full, given {granularity or 'none'}"
                )
    else:
        if args.recompute_method is None:
            raise UsageError(
                "--recompute-granularity full needs --recompute-method uniform or block"
            )
        if args.recompute_num_layers is None or args.recompute_num_layers < 1:
            most = args.num_layers // args.pipeline_model_parallel_size
            raise UsageError(
                "--recompute-granularity full needs --recompute-num-layers from 1 to "
                f"{most}, given {args.recompute_num_layers or 'none'}"
            )
    if args.distribute_saved_activations and (
        args.tensor_model_parallel_size == 1 or granularity != "full" or args.sequence_parallel
    ):
        raise UsageError(
            "--distribute-saved-activations needs --tensor-model-parallel-size above 1 and "
            "--recompute-granularity full, and does not go with --sequence-parallel"
        )


def check_experts(args: argparse.Namespace) -> None:
    """Mixture of experts; sets `moe_ffn_hidden_size`."""
    if args.num_experts == 0:
        args.num_experts = None
    experts, parallel = args.num_experts, args.expert_model_parallel_size
    if experts is None:
        if parallel > 1:
            raise UsageError(
                f"--expert-model-parallel-size {parallel} needs --num-experts, a multiple of "
                f"{parallel}: {multiples(parallel)}"
            )
        if args.moe_ffn_hidden_size is not None:
            raise UsageError(
                f"--moe-ffn-hidden-size {args.moe_ffn_hidden_size} needs --num-experts"
            )
        return
    if experts < 1 or experts % parallel:
        raise UsageError(
            f"--num-experts {experts} do not divide among --expert-model-parallel-size {parallel}; "
            f"numbers of experts that fit: {multiples(parallel, around=max(experts, 1))}; "
            f"expert-parallel sizes: {divisors(max(experts, 1))}"
        )
    if not 1 <= args.moe_router_topk <= experts:
        raise UsageError(
            f"--moe-router-topk {args.moe_router_topk}: must be from 1 to --num-experts {experts}"
        )
    if args.tensor_model_parallel_size > 1 and not args.sequence_parallel:
        raise UsageError(
            f"--num-experts {experts} with --tensor-model-parallel-size "
            f"{args.tensor_model_parallel_size} needs --sequence-parallel (and so the norms of "
            "Transformer Engine or Apex): add it, or use --tensor-model-parallel-size 1"
        )
    _check_expert_layers(args)
    if args.moe_ffn_hidden_size is None:
        args.moe_ffn_hidden_size = args.ffn_hidden_size
    width, tensor = args.moe_ffn_hidden_size, args.expert_tensor_parallel_size
    if width < 1 or width % tensor:
        raise UsageError(
            f"--moe-ffn-hidden-size {width} does not divide among --expert-tensor-parallel-size "
            f"{tensor}; widths that fit: {multiples(tensor, around=width)}"
        )


def _check_expert_layers(args: argparse.Namespace) -> None:
    if args.moe_token_dispatcher_type == "flex":
        raise UsageError(
            "--moe-token-dispatcher-type flex is not supported: use alltoall or allgather"
        )
    pattern = args.moe_layer_freq
    if isinstance(pattern, list) and len(pattern) != args.num_layers:
        raise UsageError(
            f"--moe-layer-freq describes {len(pattern)} layers, --num-layers is {args.num_layers}"
        )
    for name in ("moe_router_load_balancing_type", "moe_aux_loss_coeff"):
        given = getattr(args, name)
        if isinstance(given, list) and len(given) == 1:
            setattr(args, name, given[0])
    kinds, weights = args.moe_router_load_balancing_type, args.moe_aux_loss_coeff
    _check_router(args)
    num_kinds = len(kinds) if isinstance(kinds, list) else 1
    num_weights = len(weights) if isinstance(weights, list) else 1
    if num_kinds != num_weights and (num_kinds > 1 or num_weights > 1):
        raise UsageError(
            f"--moe-aux-loss-coeff needs one weight for each --moe-router-load-balancing-type: "
            f"{num_kinds} types, {num_weights} weights given"
        )
    if args.add_bias_linear:
        _check_expert_bias(args)


def _check_expert_bias(args: argparse.Namespace) -> None:
    shared = args.moe_shared_expert_intermediate_size
    if shared is not None:
        raise UsageError(
            f"--moe-shared-expert-intermediate-size {shared} needs --disable-bias-linear: add it"
        )
    if args.expert_tensor_parallel_size > 1:
        raise UsageError(
            f"--expert-tensor-parallel-size {args.expert_tensor_parallel_size} needs "
            "--disable-bias-linear: add it, or use --expert-tensor-parallel-size 1"
        )
    if args.expert_model_parallel_size == 1 and args.transformer_impl == "local":
        # megatron-core 0.16.1 adds an expert's bias in place to a view that autograd forbids to
        # change; with expert parallelism the output is no view.
        raise UsageError(
            f"--num-experts {args.num_experts} with --expert-model-parallel-size 1 needs "
            "--disable-bias-linear in megatron-core's local implementation: add it"
        )


def _check_router(args: argparse.Namespace) -> None:
    if args.moe_router_load_balancing_type == "sinkhorn" and args.moe_aux_loss_coeff != 0:
        raise UsageError(
            f"--moe-aux-loss-coeff {args.moe_aux_loss_coeff} does not go with "
            "--moe-router-load-balancing-type sinkhorn: leave it out"
        )
    if args.moe_apply_probs_on_input and args.moe_router_topk != 1:
        raise UsageError(
            f"--moe-apply-probs-on-input needs --moe-router-topk 1, given {args.moe_router_topk}"
        )
