"""Every flag of Megatron-LM 0.16.1 is supported exactly or refused by name, and none is ignored.

`data/megatron_lm_0.16.1_flags.json` lists the flags of its parser. Left out of an entry is what
follows from the rest: a destination spelled as the flag, a default of None (of a value), False
(of a flag that turns on) or True (of one that turns off), the type str.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import enum
import json
import signal
from pathlib import Path
from typing import Any

import pytest
from megatron.core.datasets.gpt_dataset import GPTDatasetConfig
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig
from megatron.core.transformer import TransformerConfig

from megatron.training.arguments import build_parser, parse_args, validate_args
from megatron.training.arguments.machine import Machine
from megatron.training.arguments.refusals import REFUSED
from megatron.training.arguments.refused import refused_flags

ROOT = Path(__file__).parents[2]
RECORDED = json.loads(
    (Path(__file__).parent / "data" / "megatron_lm_0.16.1_flags.json").read_text()
)["flags"]
SUPPORTED = [entry for entry in RECORDED if not refused_flags() & set(entry["flags"])]
REFUSED_VALUES = [
    entry
    for entry in RECORDED
    if refused_flags() & set(entry["flags"])
    and "kind" not in entry
    and entry.get("default") not in (None, [])
]
OUR_CHOICES = {"--tokenizer-type": ["ByteTokenizer"]}
NOT_THE_DRIVER = {"corpus.py"}
"""Read by tools/preprocess_data.py, which has flags of its own."""
MINIMAL = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 2 --seq-length 16 "
    "--max-position-embeddings 16 --micro-batch-size 1 --train-iters 1 --lr 1e-3 --eval-iters 0 "
    "--mock-data --tokenizer-type ByteTokenizer"
)

ANSWERED_BY_VALIDATION = {
    "use_rotary_position_embeddings",
    "add_position_embedding",
    "rope_type",
    "recompute_activations",
    "no_weight_decay_cond_type",
    "grad_reduce_in_bf16",
    "num_layers_per_virtual_pipeline_stage",
    "num_virtual_stages_per_pipeline_rank",
}
"""Flags whose whole effect is on other flags' values, or to be refused with some values."""

WITHOUT_EFFECT_AS_IN_MEGATRON_LM = {
    "deprecated_use_mcore_models",
    "use_dist_ckpt_deprecated",
    "dist_ckpt_format_deprecated",
    "ckpt_fully_parallel_save_deprecated",
    "legacy_tokenizer",
    "tokenizer_hf_use_fast",
}
"""Flags of old scripts that ask for what is always so here."""


def action_of(parser: argparse.ArgumentParser, flag: str) -> argparse.Action:
    return parser._option_string_actions[flag]


def plain(value: Any) -> Any:
    if isinstance(value, enum.Enum):
        return value.name
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return value


@pytest.fixture(scope="module")
def parser() -> argparse.ArgumentParser:
    return build_parser()


def test_every_flag_of_megatron_lm_is_known(parser: argparse.ArgumentParser) -> None:
    recorded = {flag for entry in RECORDED for flag in entry["flags"]}

    known = set(parser._option_string_actions)
    assert recorded - known == set()
    assert known - recorded == {"-h", "--help"}


def differences(action: argparse.Action, entry: dict[str, Any]) -> list[str]:
    """What of a supported flag is not as recorded."""
    kind = entry.get("kind", "value")
    choices = entry.get("choices")
    if choices is not None:
        choices = choices + OUR_CHOICES.get(entry["flags"][0], [])
    if entry["flags"] == ["--exit-signal"]:
        # The record is of Python 3.11; 3.10 does not name every signal.
        choices = [name for name in choices if hasattr(signal, name)]
    default = {"on": False, "off": True, "value": None}[kind]
    pairs = {
        "spellings": (list(action.option_strings), entry["flags"]),
        "dest": (action.dest, entry.get("dest", entry["flags"][0][2:].replace("-", "_"))),
        "default": (plain(action.default), entry.get("default", default)),
    }
    if kind == "value":
        given = None if action.choices is None else plain(list(action.choices))
        pairs["nargs"] = (action.nargs, entry.get("nargs"))
        pairs["choices"] = (given, choices)
        pairs["type"] = (type_name(action, entry), entry.get("type", "str"))
    else:
        pairs["switch"] = (action.const, kind == "on")
    return [f"{entry['flags'][0]} {k}: {a!r} is not {b!r}" for k, (a, b) in pairs.items() if a != b]


def type_name(action: argparse.Action, entry: dict[str, Any]) -> str:
    """The type's name; a reader of our own answers to the name of Megatron-LM's."""
    plain_types = {int: "int", float: "float", str: "str"}
    if action.type in plain_types:
        return plain_types[action.type]
    recorded = entry.get("type", "str")
    return "a reader" if recorded in plain_types.values() else recorded


def test_supported_flags_have_recorded_spellings_defaults_and_shapes(
    parser: argparse.ArgumentParser,
) -> None:
    found = [d for e in SUPPORTED for d in differences(action_of(parser, e["flags"][0]), e)]

    assert found == []


def test_no_flag_is_both_supported_and_refused() -> None:
    names = [name for refusal in REFUSED for name, _ in refusal.entries()]

    assert len(names) == len(set(names))
    assert set(names) <= {flag for entry in RECORDED for flag in entry["flags"]}


def test_refused_flags_end_with_their_name_the_reason_and_the_way_out(
    parser: argparse.ArgumentParser, capsys: pytest.CaptureFixture[str]
) -> None:
    for refusal in REFUSED:
        for flag, _ in refusal.entries():
            with pytest.raises(SystemExit) as stopped:
                parser.parse_args([flag, "12345"])

            message = capsys.readouterr().err
            assert stopped.value.code == 2, flag
            assert all(part in message for part in (flag, refusal.reason, refusal.instead[1:]))


def test_refused_flags_typed_with_their_defaults_pass(parser: argparse.ArgumentParser) -> None:
    words: list[str] = []
    for entry in REFUSED_VALUES:
        default = entry["default"]
        values = default if isinstance(default, list) else [default]
        words += [entry["flags"][0], *map(str, values)]

    args = parser.parse_args(["--num-layers", "2", *words])

    assert args.num_layers == 2


def attributes_read_by_the_driver(*, without: tuple[str, ...] = ()) -> set[str]:
    """Names after `args.`, and names in quotes, in everything that gets the parsed arguments."""
    read: set[str] = set()
    files = [*(ROOT / "megatron" / "training").rglob("*.py"), *(ROOT / "deadpool").rglob("*.py")]
    for file in files:
        if any(part in file.as_posix() for part in without):
            continue
        for node in ast.walk(ast.parse(file.read_text())):
            match node:
                case ast.Attribute(value=ast.Name(id="args"), attr=name):
                    read.add(name)
                case ast.Attribute(value=ast.Attribute(attr="args" | "_args"), attr=name):
                    read.add(name)
                case ast.Constant(value=str() as name) if name.isidentifier():
                    read.add(name)
    return read


def test_every_supported_flag_has_an_effect(parser: argparse.ArgumentParser) -> None:
    flag_tables = ("arguments/flags_", "arguments/generated", "arguments/refus", "arguments/rules_")
    read = attributes_read_by_the_driver(without=(*flag_tables, "arguments/requirements"))
    for config in (
        TransformerConfig,
        OptimizerConfig,
        DistributedDataParallelConfig,
        GPTDatasetConfig,
    ):
        read |= {field.name for field in dataclasses.fields(config)}

    supported = {action_of(parser, entry["flags"][0]).dest for entry in SUPPORTED}
    idle = supported - read - ANSWERED_BY_VALIDATION - WITHOUT_EFFECT_AS_IN_MEGATRON_LM
    assert idle == set()


def test_every_attribute_the_driver_reads_exists_after_validation() -> None:
    args = validate_args(parse_args(MINIMAL.split()), 1, Machine(has_gpu=False))
    set_later = {"iteration", "padded_vocab_size"}

    read: set[str] = set()
    for file in (ROOT / "megatron" / "training").rglob("*.py"):
        if file.name in NOT_THE_DRIVER:
            continue
        for node in ast.walk(ast.parse(file.read_text())):
            match node:
                case ast.Attribute(value=ast.Name(id="args"), attr=name, ctx=ast.Load()):
                    read.add(name)
    assert read - set(vars(args)) - set_later == set()
