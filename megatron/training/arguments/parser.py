"""Builds the parser and reads a command line."""

from __future__ import annotations

import argparse
import difflib
import os
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from megatron.training.arguments.errors import UsageError, exit_with_usage_error
from megatron.training.arguments.flags_model import INITIALIZATION, MODEL
from megatron.training.arguments.flags_run import (
    CHECKPOINT,
    DATA,
    DISTRIBUTED,
    LOGGING,
    TOKENIZER,
)
from megatron.training.arguments.flags_training import EVALUATION, PRECISION, SCHEDULE, TRAINING
from megatron.training.arguments.generated import field_texts, generated_groups
from megatron.training.arguments.refused import (
    add_refused_flags,
    refusal_message,
    refused_flags,
)

ExtraArgsProvider = Callable[[argparse.ArgumentParser], argparse.ArgumentParser | None]

HANDWRITTEN = (
    ("model", MODEL),
    ("initialization", INITIALIZATION),
    ("training", TRAINING),
    ("learning rate and weight decay", SCHEDULE),
    ("precision", PRECISION),
    ("evaluation", EVALUATION),
    ("distributed", DISTRIBUTED),
    ("data", DATA),
    ("tokenizer", TOKENIZER),
    ("checkpoints", CHECKPOINT),
    ("logs", LOGGING),
)


class MegatronParser(argparse.ArgumentParser):
    """Takes flags in full only, refuses unsupported ones by name, and notes which were typed.

    Errors end the process with exit code 2, printed by the rank that RANK in the environment
    calls 0 (or no rank at all).
    """

    def parse_known_args(  # type: ignore[override]
        self,
        args: Sequence[str] | None = None,
        namespace: argparse.Namespace | None = None,
    ) -> tuple[argparse.Namespace, list[str]]:
        parsed, unknown = super().parse_known_args(args, namespace)
        if hasattr(parsed, "refused"):
            self.error(refusal_message(parsed.refused))
        if unknown:
            flags = [word for word in unknown if word.startswith("--")]
            # Words after an unknown flag are its values: the flag alone is worth naming.
            self.error("\n".join(self._unknown(word) for word in flags or unknown))
        parsed.typed = self._typed(args)
        return parsed, unknown

    def error(self, message: str) -> NoReturn:
        exit_with_usage_error(UsageError(message), int(os.environ.get("RANK") or 0))

    def format_help(self) -> str:
        texts = field_texts()
        for action in self._actions:
            if action.help is None:
                action.help = texts.get(action.dest, "").replace("%", "%%")
        return super().format_help()

    def _typed(self, args: Sequence[str] | None) -> frozenset[str]:
        """Destinations of the flags that stand on the command line, whatever their value."""
        defaults = {action: action.default for action in self._actions}
        set_by_code, self._defaults = self._defaults, {}
        try:
            for action in self._actions:
                action.default = argparse.SUPPRESS
            typed, _ = super().parse_known_args(args, argparse.Namespace())
        finally:
            self._defaults = set_by_code
            for action, default in defaults.items():
                action.default = default
        return frozenset(vars(typed))

    def _unknown(self, word: str) -> str:
        if not word.startswith("--"):
            return f"{word!r} belongs to no flag"
        flag = word.partition("=")[0]
        known = set(self._option_string_actions) - refused_flags()
        close = difflib.get_close_matches(flag, sorted(known), n=3, cutoff=0.75)
        hint = f"; did you mean {' or '.join(close)}?" if close else "; --help lists the flags"
        return f"unknown flag {flag}{hint}"


def build_parser(extra_args_provider: ExtraArgsProvider | None = None) -> MegatronParser:
    """The parser of every supported flag. `extra_args_provider(parser)` adds its own groups."""
    parser = MegatronParser(
        description="Pretrain a GPT with megatron-core; flags are Megatron-LM 0.16.1's.",
        usage="%(prog)s [flags]",
        allow_abbrev=False,
    )
    refused = refused_flags()
    for title, flags in (*HANDWRITTEN, *generated_groups()):
        group = parser.add_argument_group(title)
        for flag in flags:
            if refused.intersection(flag.names):
                parser.set_defaults(**{flag.dest: flag.default})
            else:
                flag.add_to(group)
    if extra_args_provider is not None:
        extra_args_provider(parser)
    add_refused_flags(parser)
    return parser


def parse_args(
    argv: Sequence[str] | None = None, extra_args_provider: ExtraArgsProvider | None = None
) -> argparse.Namespace:
    """Read a command line (`sys.argv[1:]` by default) into Megatron-LM's attribute names.

    `args.typed` holds the destinations of the flags that were typed, `args.notes` what
    `validate_args` has to tell the user.
    """
    args: Any = build_parser(extra_args_provider).parse_args(argv)
    args.notes = []
    return args
