"""Flags made from megatron-core's config dataclasses.

A field becomes `--its-name`; a bool that is true by default becomes `--no-its-name` and
`--disable-its-name`. megatron-core 0.16 marks in a field's metadata where Megatron-LM's command
line differs (`argparse_meta`); where the metadata is silent and Megatron-LM differs all the same,
`OVERRIDES` says how.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import enum
import inspect
import itertools
import textwrap
import types
import typing
from collections.abc import Callable, Iterator
from typing import Any

from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig
from megatron.core.transformer import TransformerConfig

from megatron.training.arguments.flag import Flag, off_switch, switch, value

SOURCES: tuple[tuple[str, type], ...] = (
    ("model and parallelism (TransformerConfig)", TransformerConfig),
    ("optimizer (OptimizerConfig)", OptimizerConfig),
    ("data-parallel engine (DistributedDataParallelConfig)", DistributedDataParallelConfig),
)

_DERIVED = """
    virtual_pipeline_model_parallel_size params_dtype enable_autocast autocast_dtype
    num_microbatches_with_partial_activation_checkpoints use_te_rng_tracker tp_comm_atomic_ag
    tp_comm_atomic_rs tp_comm_overlap_disable_qkv tp_comm_overlap_disable_fc1 pipeline_dtype
    variable_seq_lengths batch_p2p_comm batch_p2p_sync deallocate_pipeline_outputs cpu_offloading
    cpu_offloading_activations cpu_offloading_weights cpu_offloading_double_buffering
    softmax_scale gated_linear_unit activation_func_fp8_input_store bias_activation_fusion
    persist_layer_norm memory_efficient_layer_norm fused_single_qkv_rope fp8_param
    fp8_dot_product_attention fp8_multi_head_attention tp_only_amax_red use_kitchen
    moe_router_topk_limited_devices moe_token_dropping cuda_graph_use_single_mempool
    cuda_graph_retain_backward_graph disable_parameter_transpose_cache inference_sampling_seed
    use_inference_optimized_layers heterogeneous_block_specs hetereogenous_dist_checkpoint
    quant_recipe store_param_remainders decoupled_weight_decay grad_reduce_in_fp32
    check_for_nan_in_grad use_custom_fsdp preserve_fp32_weights
"""
DERIVED = frozenset(_DERIVED.split())
"""Fields that Megatron-LM has no flag for: computed from other flags, or left at their default."""


def fraction_pattern(text: str) -> int | list[int]:
    """`4`, or a list of 0 and 1 per layer written as `([1]*3+[0])*2`."""
    if "[" not in text:
        return int(text)
    return _evaluate_pattern(ast.parse(text, mode="eval").body)


def _evaluate_pattern(node: ast.expr) -> Any:
    match node:
        case ast.Constant(value=int() as number):
            return number
        case ast.List(elts=elements):
            return [_evaluate_pattern(element) for element in elements]
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return _evaluate_pattern(left) + _evaluate_pattern(right)
        case ast.BinOp(left=left, op=ast.Mult(), right=right):
            return _evaluate_pattern(left) * _evaluate_pattern(right)
    raise ValueError("a layer pattern is made of numbers, lists, + and * only, as ([1]*3+[0])*2")


def window(text: str) -> tuple[int, ...]:
    """`128,0` or `(128,0)`: how many tokens attention sees to the left and to the right."""
    return tuple(int(part) for part in text.strip("()").split(","))


def by_name(members: type[enum.Enum]) -> Callable[[str], enum.Enum]:
    """Reads a member of an enum by its name."""

    def read(text: str) -> enum.Enum:
        if text not in members.__members__:
            known = ", ".join(members.__members__)
            raise argparse.ArgumentTypeError(f"{text!r} is not one of {known}")
        return members[text]

    return read


def _with(**changes: Any) -> Callable[[Flag], Flag]:
    return lambda flag: dataclasses.replace(flag, **changes)


OVERRIDES: dict[str, Flag | Callable[[Flag], Flag]] = {
    "gradient_accumulation_fusion": off_switch(
        "--no-gradient-accumulation-fusion", "gradient_accumulation_fusion", None
    ),
    "overlap_p2p_comm": off_switch("--no-overlap-p2p-communication", "overlap_p2p_comm", None),
    "masked_softmax_fusion": off_switch(
        "--no-masked-softmax-fusion", "masked_softmax_fusion", None
    ),
    "bias_dropout_fusion": off_switch("--no-bias-dropout-fusion", "bias_dropout_fusion", None),
    "apply_rope_fusion": off_switch("--no-rope-fusion", "apply_rope_fusion", None),
    "align_param_gather": off_switch("--no-align-param-gather", "align_param_gather", None),
    "attention_softmax_in_fp32": switch("--attention-softmax-in-fp32", None),
    "inference_rng_tracker": switch("--inference-rng-tracker", None),
    "test_mode": switch("--test-mode", None),
    "num_moe_experts": value("--num-experts", int, None, None),
    "num_layers_in_first_pipeline_stage": value(
        "--decoder-first-pipeline-num-layers", int, None, None
    ),
    "num_layers_in_last_pipeline_stage": value(
        "--decoder-last-pipeline-num-layers", int, None, None
    ),
    "pipeline_model_parallel_layout": value("--pipeline-model-parallel-layout", str, None, None),
    "window_size": value("--window-size", window, None, None),
    "window_attn_skip_freq": value("--window-attn-skip-freq", fraction_pattern, None, None),
    "no_rope_freq": value("--no-rope-freq", fraction_pattern, None, None),
    "moe_layer_freq": value("--moe-layer-freq", fraction_pattern, 1, None),
    "linear_attention_freq": value("--linear-attention-freq", fraction_pattern, None, None),
    "moe_router_load_balancing_type": value(
        "--moe-router-load-balancing-type",
        str,
        "aux_loss",
        None,
        nargs="+",
        choices=("aux_loss", "seq_aux_loss", "global_aux_loss", "sinkhorn", "none"),
    ),
    "moe_aux_loss_coeff": value("--moe-aux-loss-coeff", float, 0.0, None, nargs="+"),
    "cp_comm_type": value("--cp-comm-type", str, ["p2p"], None, nargs="+"),
    "cuda_graph_scope": value("--cuda-graph-scope", str, [], None, nargs="+"),
    "min_lr": _with(default=0.0),
    "optimizer": _with(choices=("adam", "sgd", "muon", "dist_muon")),
    "main_grads_dtype": value("--main-grads-dtype", str, "fp32", None, choices=("fp32", "bf16")),
    "main_params_dtype": value("--main-params-dtype", str, "fp32", None, choices=("fp32", "fp16")),
    "exp_avg_dtype": value(
        "--exp-avg-dtype", str, "fp32", None, choices=("fp32", "fp16", "bf16", "fp8")
    ),
    "exp_avg_sq_dtype": value(
        "--exp-avg-sq-dtype", str, "fp32", None, choices=("fp32", "fp16", "bf16", "fp8")
    ),
    "muon_momentum": _with(default=0.9),
    "muon_split_qkv": off_switch("--muon-no-split-qkv", "muon_split_qkv", None),
    "optimizer_offload_fraction": _with(default=1.0),
    "pin_cpu_grads": off_switch("--no-pin-cpu-grads", "pin_cpu_grads", None),
    "pin_cpu_params": off_switch("--no-pin-cpu-params", "pin_cpu_params", None),
    "bucket_size": value("--ddp-bucket-size", int, None, None),
    "pad_buckets_for_high_nccl_busbw": switch("--ddp-pad-buckets-for-high-nccl-busbw", None),
    "reduce_scatter_with_fp32_accumulation": switch(
        "--ddp-reduce-scatter-with-fp32-accumulation", None
    ),
    "average_in_collective": switch("--ddp-average-in-collective", None),
    "gradient_reduce_div_fusion": off_switch(
        "--no-gradient-reduce-div-fusion", "gradient_reduce_div_fusion", None
    ),
    "nccl_ub": switch("--use-nccl-ub", None, dest="nccl_ub"),
}
"""Where Megatron-LM's flag differs from the rule: a whole flag, or a change to the made one."""


class _NotAFlag(Exception):
    """The field's type cannot be typed on a command line (a function, a context manager)."""


def _type_of(annotation: Any) -> dict[str, Any]:
    """`type`, `nargs` and `choices` of a flag for this annotation."""
    origin, inner = typing.get_origin(annotation), typing.get_args(annotation)
    if annotation in (int, float, str, bool):
        return {"type": annotation}
    if isinstance(annotation, type) and issubclass(annotation, enum.Enum):
        return {"type": by_name(annotation), "choices": tuple(annotation)}
    if origin in (typing.Union, types.UnionType) and len(inner) == 2 and inner[1] is type(None):
        return _type_of(inner[0])
    if origin is list and len(inner) == 1:
        return {**_type_of(inner[0]), "nargs": "+"}
    if origin is typing.Literal:
        return {"type": type(inner[0]), "choices": inner}
    raise _NotAFlag(annotation)


def _flag_of(field: dataclasses.Field[Any], annotation: Any) -> Flag:
    meta = field.metadata.get("argparse_meta", {})
    kind = _type_of(annotation)
    default = field.default
    if default is dataclasses.MISSING and field.default_factory is not dataclasses.MISSING:
        default = field.default_factory()
    name = field.name.replace("_", "-")
    if kind["type"] is bool:
        names = [f"--{name}"] if not default else [f"--no-{name}", f"--disable-{name}"]
        kind = {"switch": not default}
    else:
        names = [f"--{name}"]
    return Flag(
        names=tuple(meta.get("arg_names", names)),
        dest=field.name,
        default=meta.get("default", default),
        help=None,
        **kind,
    )


def flags_of(config: type) -> Iterator[tuple[str, Flag]]:
    """(field name, flag) of every field of a config dataclass that has a flag."""
    annotations = typing.get_type_hints(config)
    for field in dataclasses.fields(config):
        if field.name in DERIVED or not field.init:
            continue
        override = OVERRIDES.get(field.name)
        if isinstance(override, Flag):
            yield field.name, override
            continue
        try:
            flag = _flag_of(field, annotations[field.name])
        except _NotAFlag:
            continue
        yield field.name, override(flag) if override else flag


def generated_groups() -> Iterator[tuple[str, list[Flag]]]:
    """(group title, its flags); a field that several dataclasses share appears once."""
    seen: set[str] = set()
    for title, config in SOURCES:
        flags = [flag for _, flag in flags_of(config) if flag.dest not in seen]
        seen.update(flag.dest for flag in flags)
        yield title, flags


def field_texts() -> dict[str, str]:
    """The docstring under each dataclass field, by the flag's destination."""
    texts: dict[str, str] = {}
    for _, config in SOURCES:
        by_field: dict[str, str] = {}
        for ancestor in reversed(config.__mro__[:-1]):
            by_field.update(_docstrings(ancestor))
        for name, flag in flags_of(config):
            if name in by_field:
                texts.setdefault(flag.dest, by_field[name])
    return texts


def _docstrings(config: type) -> Iterator[tuple[str, str]]:
    tree = ast.parse(textwrap.dedent(inspect.getsource(config)))
    body = tree.body[0].body  # type: ignore[attr-defined]
    for field, text in itertools.pairwise(body):
        match field, text:
            case (
                ast.AnnAssign(target=ast.Name(id=name)),
                ast.Expr(value=ast.Constant(value=str() as docstring)),
            ):
                yield name, " ".join(docstring.split())
