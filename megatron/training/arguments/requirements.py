"""Flags that work only with a GPU or with Transformer Engine, as data."""

from __future__ import annotations

import argparse
import enum
from dataclasses import dataclass
from typing import Any

from megatron.training.arguments.errors import UsageError
from megatron.training.arguments.machine import Machine


class Needs(enum.Enum):
    """What a flag cannot work without."""

    GPU = "a GPU, and there is none here"
    TRANSFORMER_ENGINE = (
        "Transformer Engine's layers: a GPU with the package transformer-engine, and "
        "--transformer-impl transformer_engine"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Requirement:
    """One flag and what it needs when it is set to something else than `idle`."""

    flag: str
    dest: str
    needs: Needs
    idle: Any


def _switches(needs: Needs, flags: str) -> list[Requirement]:
    return [
        Requirement(flag=f"--{name}", dest=name.replace("-", "_"), needs=needs, idle=False)
        for name in flags.split()
    ]


REQUIREMENTS = (
    *_switches(
        Needs.TRANSFORMER_ENGINE,
        "moe-grouped-gemm moe-permute-fusion"
        " moe-router-fusion moe-router-padding-for-quantization moe-router-padding-for-fp8"
        " use-te-activation-func te-rng-tracker first-last-layers-bf16"
        " use-precision-aware-optimizer",
    ),
    *_switches(
        Needs.GPU,
        "moe-shared-expert-overlap defer-embedding-wgrad-compute"
        " ddp-reduce-scatter-with-fp32-accumulation",
    ),
    Requirement(flag="--fp8-format", dest="fp8", needs=Needs.TRANSFORMER_ENGINE, idle=None),
    Requirement(flag="--fp4-format", dest="fp4", needs=Needs.TRANSFORMER_ENGINE, idle=None),
    Requirement(
        flag="--moe-latent-size",
        dest="moe_latent_size",
        needs=Needs.TRANSFORMER_ENGINE,
        idle=None,
    ),
    Requirement(
        flag="--window-size", dest="window_size", needs=Needs.TRANSFORMER_ENGINE, idle=None
    ),
)


NEEDS_KNOWING_NORM = {
    "--sequence-parallel": "sequence_parallel",
    "--apply-layernorm-1p": "layernorm_zero_centered_gamma",
    "--fp32-residual-connection": "fp32_residual_connection",
}
"""Flags that torch's own norms know nothing of."""


def norms_are_fused(args: argparse.Namespace, machine: Machine) -> bool:
    """Whether layers get Transformer Engine's or Apex's norms; megatron-core takes torch's else."""
    if args.transformer_impl == "transformer_engine":
        return True
    return machine.apex_norm and args.normalization == "LayerNorm"


def check_requirements(args: argparse.Namespace, machine: Machine) -> None:
    """Refuse what this machine, or the chosen implementation, has no code for."""
    met = {
        Needs.GPU: machine.has_gpu,
        Needs.TRANSFORMER_ENGINE: args.transformer_impl == "transformer_engine",
    }
    for requirement in REQUIREMENTS:
        given = getattr(args, requirement.dest)
        if given != requirement.idle and not met[requirement.needs]:
            shown = "" if given is True else f" {given}"
            raise UsageError(
                f"{requirement.flag}{shown} needs {requirement.needs.value}: leave it out"
            )
    for flag, dest in NEEDS_KNOWING_NORM.items():
        if getattr(args, dest) and not norms_are_fused(args, machine):
            raise UsageError(
                f"{flag} needs the norms of Transformer Engine, or Apex's LayerNorm; "
                f"--transformer-impl {args.transformer_impl} with --normalization "
                f"{args.normalization} has neither here: leave {flag} out"
            )
    if args.cross_entropy_fusion_impl == "te" and not met[Needs.TRANSFORMER_ENGINE]:
        raise UsageError(
            f"--cross-entropy-fusion-impl te needs {Needs.TRANSFORMER_ENGINE.value}: use native"
        )
    needing = sorted({"layernorm", "moe_act"} & set(args.recompute_modules or ()))
    if needing and args.recompute_granularity == "selective" and machine.transformer_engine is None:
        raise UsageError(
            f"--recompute-modules {' '.join(needing)} needs the package transformer-engine and a "
            "GPU: choose other modules"
        )
    _check_attention_backend(args)


def _check_attention_backend(args: argparse.Namespace) -> None:
    name = args.attention_backend.name
    on_te = args.transformer_impl == "transformer_engine"
    if on_te and name == "local":
        raise UsageError(
            "--attention-backend local goes with --transformer-impl local; use auto, flash, fused "
            "or unfused"
        )
    if not on_te and name in ("flash", "fused"):
        raise UsageError(
            f"--attention-backend {name} needs Transformer Engine: use auto or unfused with "
            "--transformer-impl local"
        )
