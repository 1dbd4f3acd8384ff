"""Refuses by name, rather than ignores, the flags of Megatron-LM that are not supported."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from megatron.training.arguments.refusals import REFUSED, Refusal


class RefuseAction(argparse.Action):
    """Notes the flag in `namespace.refused`, which `parse_args` turns into one message."""

    def __init__(
        self,
        option_strings: Sequence[str],
        dest: str,
        *,
        refusal: Refusal,
        harmless: str | None,
        **kwargs: Any,
    ) -> None:
        kwargs.update(nargs="*", default=argparse.SUPPRESS)
        super().__init__(option_strings, dest, **kwargs)
        self.refusal = refusal
        self.harmless = harmless

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> None:
        given = " ".join(values or ())
        if self.harmless is not None and any(_same(given, h) for h in self.harmless.split(",")):
            return
        refused = [*getattr(namespace, "refused", ()), (option_string, self.refusal)]
        namespace.refused = refused


def _same(given: str, harmless: str) -> bool:
    try:
        return float(given) == float(harmless)
    except ValueError:
        return given == harmless


def refusal_message(refused: Sequence[tuple[str, Refusal]]) -> str:
    """One line per refused flag."""
    lines = [f"{flag} is not supported: {r.reason}. {_sentence(r.instead)}" for flag, r in refused]
    return "\n".join(dict.fromkeys(lines))


def _sentence(text: str) -> str:
    return f"{text[0].upper()}{text[1:]}."


def refused_flags() -> frozenset[str]:
    """Every refused spelling."""
    return frozenset(name for refusal in REFUSED for name, _ in refusal.entries())


NEUTRAL = {"rerun_mode": "disabled", "result_rejected_tracker_filename": None}
"""What the driver hands to megatron-core where the flag for it is refused."""


def add_refused_flags(parser: argparse.ArgumentParser) -> None:
    """Declare them, hidden from --help."""
    parser.set_defaults(**NEUTRAL)
    for refusal in REFUSED:
        for name, harmless in refusal.entries():
            parser.add_argument(
                name,
                action=RefuseAction,
                dest="refused",
                refusal=refusal,
                harmless=harmless,
                help=argparse.SUPPRESS,
            )
