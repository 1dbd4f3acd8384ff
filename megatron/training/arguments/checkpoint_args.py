"""`--use-checkpoint-args`: the model's shape comes from the checkpoint to load."""

from __future__ import annotations

import argparse

from megatron.core import dist_checkpointing

from megatron.training.arguments.errors import UsageError

_ALWAYS = """
    num_query_groups group_query_attention position_embedding_type add_position_embedding
    use_rotary_position_embeddings rotary_base rotary_percent rotary_interleaved add_bias_linear
    add_qkv_bias squared_relu swiglu untie_embeddings_and_output_weights
    layernorm_zero_centered_gamma normalization apply_query_key_layer_scaling attention_dropout
    hidden_dropout num_experts moe_layer_freq moe_router_topk moe_router_pre_softmax
    moe_grouped_gemm moe_shared_expert_intermediate_size moe_router_score_function
    moe_router_enable_expert_bias moe_router_topk_scaling_factor moe_latent_size
"""
ALWAYS = frozenset(_ALWAYS.split())
"""The checkpoint's value wins even over a typed one, as in Megatron-LM."""

_WHERE_UNSET = """
    num_layers hidden_size ffn_hidden_size seq_length num_attention_heads kv_channels
    max_position_embeddings padded_vocab_size
"""
WHERE_UNSET = frozenset(_WHERE_UNSET.split())
"""The checkpoint's value fills in what the command line leaves out."""

TOKENIZER = frozenset({"tokenizer_model", "tokenizer_type", "vocab_size"})


def apply_checkpoint_args(args: argparse.Namespace) -> None:
    """Copy the model's shape from the checkpoint that --load names; nothing if there is none."""
    if not args.use_checkpoint_args:
        return
    if args.load is None:
        raise UsageError("--use-checkpoint-args needs --load")
    # Imported here: it imports this package in turn.
    from megatron.training.checkpoint_fit import checkpoint_to_load

    found = checkpoint_to_load(args)
    if found is None:
        args.notes.append(f"--use-checkpoint-args: no checkpoint in {args.load} to take them from")
        return
    path, _ = found
    stored = dist_checkpointing.load_common_state_dict(str(path)).get("args")
    if stored is None:
        raise UsageError(
            f"--use-checkpoint-args: the checkpoint {path} holds no arguments; type the model's "
            "flags instead"
        )
    tokenizer = TOKENIZER if args.use_tokenizer_model_from_checkpoint_args else frozenset()
    for name in sorted(ALWAYS | WHERE_UNSET | tokenizer):
        value = getattr(stored, name, None)
        if value is None or (name in WHERE_UNSET and getattr(args, name) is not None):
            continue
        setattr(args, name, value)
    args.moe_ffn_hidden_size = getattr(stored, "moe_ffn_hidden_size", None)
    args.notes.append(f"--use-checkpoint-args: the model's shape is that of {path}")
