"""What the machine offers, as far as flags depend on it."""

from __future__ import annotations

import importlib.metadata
import importlib.util
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """Hardware and optional packages; tests make their own."""

    has_gpu: bool
    device_generation: int = 0
    """Major compute capability of the first GPU; 0 without one."""
    transformer_engine: tuple[int, ...] | None = None
    """Version of Transformer Engine, None where it is not installed."""
    apex_norm: bool = False
    """Apex's fused LayerNorm is installed."""
    apex_softmax: bool = False
    """Apex's fused masked softmax kernels are installed."""
    apex_rope: bool = False
    """Apex's fused rotary embedding is installed."""
    apex_weight_gradient: bool = False
    """Apex's kernel that adds weight gradients in place is installed."""


def detect_machine() -> Machine:
    """Look at this machine, without making a CUDA context where there is no GPU."""
    has_gpu = torch.cuda.is_available()
    return Machine(
        has_gpu=has_gpu,
        device_generation=torch.cuda.get_device_capability()[0] if has_gpu else 0,
        transformer_engine=_transformer_engine_version() if has_gpu else None,
        apex_norm=has_gpu and _installed("apex.normalization"),
        apex_softmax=has_gpu and _installed("scaled_upper_triang_masked_softmax_cuda"),
        apex_rope=has_gpu and _installed("fused_rotary_positional_embedding"),
        apex_weight_gradient=has_gpu and _installed("fused_weight_gradient_mlp_cuda"),
    )


def _installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ImportError:
        return False


def _transformer_engine_version() -> tuple[int, ...] | None:
    if not _installed("transformer_engine"):
        return None
    try:
        text = importlib.metadata.version("transformer-engine")
    except importlib.metadata.PackageNotFoundError:
        return (0,)
    numbers = text.split("+")[0].split(".")
    return tuple(int(part) for part in numbers if part.isdigit())
