"""What a command line reads as, and how a bad one ends."""

from __future__ import annotations

import argparse
import signal

import pytest
from megatron.core.transformer.enums import AttnBackend

from megatron.training.arguments import (
    UsageError,
    build_parser,
    exit_with_usage_error,
    parse_args,
)


def message_of(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """What stderr says when parsing `words` ends with exit code 2."""
    with pytest.raises(SystemExit) as stopped:
        parse_args(words)
    assert stopped.value.code == 2
    return capsys.readouterr().err


def test_unknown_flag_is_answered_with_close_ones(capsys: pytest.CaptureFixture[str]) -> None:
    assert "did you mean --num-layers?" in message_of(capsys, "--num-layer", "4")


def test_unknown_flag_unlike_any_points_to_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert "--help lists the flags" in message_of(capsys, "--zzz")


def test_refused_flag_is_not_suggested(capsys: pytest.CaptureFixture[str]) -> None:
    assert "did you mean" not in message_of(capsys, "--async-saves")


def test_abbreviation_is_not_taken(capsys: pytest.CaptureFixture[str]) -> None:
    assert "unknown flag --tensor-model-parallel" in message_of(
        capsys, "--tensor-model-parallel", "2"
    )


def test_word_without_flag_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert "'stray' belongs to no flag" in message_of(capsys, "--num-layers", "4", "stray")


def test_value_of_wrong_type_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    message = message_of(capsys, "--num-layers", "four")

    assert "--num-layers" in message and "'four'" in message


def test_wrong_choice_of_an_enum_lists_the_names(capsys: pytest.CaptureFixture[str]) -> None:
    assert "flash, fused, unfused, local, auto" in message_of(capsys, "--attention-backend", "x")


def test_several_refused_flags_are_named_together(capsys: pytest.CaptureFixture[str]) -> None:
    message = message_of(capsys, "--async-save", "--use-megatron-fsdp")

    assert "--async-save" in message and "--use-megatron-fsdp" in message


def test_error_on_a_rank_above_0_exits_silently(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "3")

    assert message_of(capsys, "--zzz") == ""


@pytest.mark.parametrize(("rank", "printed"), [(0, "error: too many\n"), (1, "")])
def test_usage_error_is_printed_by_rank_0_alone(
    capsys: pytest.CaptureFixture[str], rank: int, printed: str
) -> None:
    with pytest.raises(SystemExit) as stopped:
        exit_with_usage_error(UsageError("too many"), rank)

    assert stopped.value.code == 2
    assert capsys.readouterr().err == printed


def test_typed_holds_what_stands_on_the_command_line_even_at_its_default() -> None:
    args = parse_args(["--num-layers", "4", "--transformer-impl", "transformer_engine"])

    assert args.typed == {"num_layers", "transformer_impl"}


def test_extra_provider_adds_its_group() -> None:
    def provider(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        parser.add_argument_group("deadpool").add_argument("--deadpool", action="store_true")
        return parser

    assert parse_args(["--deadpool"], provider).deadpool is True


@pytest.mark.parametrize(
    ("words", "name", "value"),
    [
        ("--moe-layer-freq 2", "moe_layer_freq", 2),
        ("--moe-layer-freq ([0]+[1]*3)*2", "moe_layer_freq", [0, 1, 1, 1, 0, 1, 1, 1]),
        ("--window-size (128,0)", "window_size", (128, 0)),
        ("--attention-backend unfused", "attention_backend", AttnBackend.unfused),
        ("--exit-signal SIGUSR1", "exit_signal", signal.SIGUSR1),
        ("--no-overlap-p2p-communication", "overlap_p2p_comm", False),
        ("--disable-manual-gc-eval", "manual_gc_eval", False),
        ("--persistent-save-interval 5", "save_interval", 5),
        ("--override-opt-param-scheduler", "override_opt_param_scheduler", True),
        ("--rampup-batch-size 2 2 100", "rampup_batch_size", [2, 2, 100]),
        ("--data-path 0.3 a 0.7 b", "data_path", ["0.3", "a", "0.7", "b"]),
        ("--norm-epsilon=1e-6", "layernorm_epsilon", 1e-6),
    ],
)
def test_flag_reads_as_its_value(words: str, name: str, value: object) -> None:
    assert getattr(parse_args(words.split()), name) == value


@pytest.mark.parametrize("pattern", ["[__import__('os')]", "[1]-[0]", "[x]*2"])
def test_layer_pattern_of_anything_but_numbers_is_refused(
    capsys: pytest.CaptureFixture[str], pattern: str
) -> None:
    assert "--moe-layer-freq" in message_of(capsys, "--moe-layer-freq", pattern)


def test_help_has_a_text_for_every_supported_flag() -> None:
    parser = build_parser()
    text = parser.format_help()

    assert "--tensor-model-parallel-size" in text and "--async-save" not in text
    assert [a.option_strings for a in parser._actions if not a.help] == []
