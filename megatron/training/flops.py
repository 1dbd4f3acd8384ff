"""Floating-point operations of a batch, counted as Megatron-LM counts them."""

from __future__ import annotations

from argparse import Namespace

_PASSES = 3
"""Forward, gradient of the weights, gradient of the inputs."""
_PER_MULTIPLY_ADD = 2


def floating_point_operations(args: Namespace, batch_size: int) -> float:
    """Of the matrix products of one iteration over `batch_size` sequences."""
    per_token = _mlp(args) + args.num_layers * _attention(args) + _logits(args)
    return _PASSES * _PER_MULTIPLY_ADD * batch_size * args.seq_length * per_token


def _mlp(args: Namespace) -> float:
    matrices = 3 if args.swiglu else 2
    num_moe_layers = _num_moe_layers(args)
    num_dense_layers = args.num_layers - num_moe_layers
    expert_width = args.moe_ffn_hidden_size or args.ffn_hidden_size
    shared_width = args.moe_shared_expert_intermediate_size or 0
    routed = args.moe_router_topk * expert_width if args.num_experts is not None else 0
    widths = args.ffn_hidden_size * num_dense_layers + (routed + shared_width) * num_moe_layers
    return args.hidden_size * widths * matrices


def _num_moe_layers(args: Namespace) -> int:
    if args.num_experts is None:
        return 0
    if isinstance(args.moe_layer_freq, int):
        return -(-args.num_layers // args.moe_layer_freq)
    return sum(args.moe_layer_freq)


def _attention(args: Namespace) -> float:
    query_width = args.kv_channels * args.num_attention_heads
    groups = args.num_query_groups if args.group_query_attention else args.num_attention_heads
    key_value_width = 2 * args.kv_channels * groups
    gate_width = query_width if getattr(args, "attention_output_gate", False) else 0
    projections = args.hidden_size * (query_width + key_value_width + gate_width)
    # Scores and their product with the values; a causal mask leaves half of each.
    core = query_width * args.seq_length / 2 * 2
    return projections + core + query_width * args.hidden_size


def _logits(args: Namespace) -> float:
    return args.hidden_size * args.padded_vocab_size
