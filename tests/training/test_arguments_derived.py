"""Derived values and config objects equal Megatron-LM 0.16.1's own, recorded from its code.

`data/megatron_lm_0.16.1_derived.json` holds, per set of flags, what its `validate_args` changed
and the fields of the config dataclasses it built, as differences from the set `plain`.
"""

from __future__ import annotations

import dataclasses
import enum
import json
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.training.arguments import (
    ddp_config_from_args,
    optimizer_config_from_args,
    parse_args,
    transformer_config_from_args,
    validate_args,
)
from megatron.training.arguments.machine import Machine

RECORD = json.loads(
    (Path(__file__).parent / "data" / "megatron_lm_0.16.1_derived.json").read_text()
)
NUM_PARAMETERS = 1003
CPU = Machine(has_gpu=False)
CPU_WITH_NORMS = Machine(has_gpu=False, apex_norm=True)
"""Stands in for Apex where a set of flags uses sequence parallelism."""

KNOWN_DIFFERENCES = {
    "deallocate_pipeline_outputs": "False with gloo, whose sends would read a freed buffer",
    "use_cpu_initialization": "Megatron-LM hands over None, which means the same as False",
    "cuda_graph_scope": "recorded as an empty list",
}


def plain(value: Any) -> Any:
    """`value` as the record writes it."""
    if isinstance(value, enum.Enum):
        return value.name
    if isinstance(value, torch.dtype):
        return str(value)
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if callable(value):
        return f"<{getattr(value, '__qualname__', type(value).__name__)}>"
    if isinstance(value, (int, float, str, bool, type(None))):
        return value
    return repr(value)


def validated(name: str) -> Namespace:
    run = RECORD["runs"][name]
    flags = [*RECORD["common_flags"], *run["flags"]]
    machine = CPU_WITH_NORMS if "--sequence-parallel" in flags else CPU
    return validate_args(parse_args(flags), run["world_size"], machine)


def expected(name: str, part: str) -> dict[str, Any]:
    return {**RECORD["common"][part], **RECORD["runs"][name][part]}


def differences(config: Any, wanted: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    """field -> (ours, Megatron-LM's)."""
    ours = {f.name: plain(getattr(config, f.name)) for f in dataclasses.fields(config)}
    return {
        key: (ours[key], value)
        for key, value in wanted.items()
        if key not in KNOWN_DIFFERENCES and ours[key] != value
    }


@pytest.mark.parametrize("name", RECORD["runs"])
def test_validate_args_of_recorded_flags_gives_recorded_values(name: str) -> None:
    args = validated(name)

    ours = {key: plain(value) for key, value in vars(args).items()}
    wanted = expected(name, "args")
    assert {key: ours.get(key, "absent") for key in wanted} == wanted


@pytest.mark.parametrize("name", RECORD["runs"])
def test_configs_of_recorded_flags_have_recorded_fields(name: str) -> None:
    args = validated(name)

    assert not differences(transformer_config_from_args(args), expected(name, "transformer"))
    assert not differences(optimizer_config_from_args(args), expected(name, "optimizer"))
    assert not differences(ddp_config_from_args(args, NUM_PARAMETERS), expected(name, "ddp"))


def test_pipeline_outputs_with_gloo_are_not_deallocated() -> None:
    args = validated("pp2")

    assert transformer_config_from_args(args).deallocate_pipeline_outputs is False
    args.distributed_backend = "nccl"
    assert transformer_config_from_args(args).deallocate_pipeline_outputs is True
