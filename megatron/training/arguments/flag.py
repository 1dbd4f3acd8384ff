"""One command-line flag as data, and the three shapes that Megatron-LM's flags come in."""

from __future__ import annotations

import argparse
import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Flag:
    """Everything `add_argument` is told about one flag."""

    names: tuple[str, ...]
    """All spellings, with their dashes."""
    dest: str
    """The attribute of the parsed arguments."""
    default: Any
    help: str | None
    """None: the text is looked up in the dataclass that the flag was generated from."""
    switch: bool | None = None
    """True or False: the flag takes no value and sets this. None: it takes a value."""
    type: Callable[[str], Any] | None = None
    nargs: int | str | None = None
    choices: tuple[Any, ...] | None = None

    def add_to(self, parser: argparse._ActionsContainer) -> None:
        """Declare the flag on a parser or group."""
        text = None if self.help is None else self.help.replace("%", "%%")
        if self.switch is not None:
            parser.add_argument(
                *self.names,
                dest=self.dest,
                default=self.default,
                help=text,
                action="store_true" if self.switch else "store_false",
            )
            return
        enums = self.choices is not None and isinstance(self.choices[0], enum.Enum)
        parser.add_argument(
            *self.names,
            dest=self.dest,
            default=self.default,
            help=text,
            type=self.type or str,
            nargs=self.nargs,
            choices=self.choices,
            metavar="{" + ",".join(c.name for c in self.choices or ()) + "}" if enums else None,
        )


def destination(name: str) -> str:
    """`--weight-decay` is stored as `weight_decay`."""
    return name.lstrip("-").replace("-", "_")


def value(
    names: str,
    type: Callable[[str], Any],
    default: Any,
    help: str | None,
    *,
    dest: str | None = None,
    nargs: int | str | None = None,
    choices: Sequence[Any] | None = None,
) -> Flag:
    """A flag that takes a value. `names`: its spellings, separated by spaces."""
    spellings = tuple(names.split())
    return Flag(
        names=spellings,
        dest=dest or destination(spellings[0]),
        default=default,
        help=help,
        type=type,
        nargs=nargs,
        choices=None if choices is None else tuple(choices),
    )


def switch(names: str, help: str | None, *, dest: str | None = None, default: Any = False) -> Flag:
    """A flag that turns something on."""
    spellings = tuple(names.split())
    return Flag(
        names=spellings,
        dest=dest or destination(spellings[0]),
        default=default,
        help=help,
        switch=True,
    )


def off_switch(names: str, dest: str, help: str | None) -> Flag:
    """A flag that turns something off that is on by default."""
    return Flag(names=tuple(names.split()), dest=dest, default=True, help=help, switch=False)
