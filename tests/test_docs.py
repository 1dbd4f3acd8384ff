"""docs/protocol.md names what the code has."""

from __future__ import annotations

import argparse
import re
import typing
from pathlib import Path

from deadpool.config import RELATIONS, add_arguments
from deadpool.messages import Hello
from deadpool.protocol.messages import Downstream, Upstream
from deadpool.protocol.types import Phase, Standing

ROOT = Path(__file__).resolve().parents[1]
TEXT = (ROOT / "docs" / "protocol.md").read_text(encoding="utf-8")
ROWS = re.findall(r"^\| `(\w+)` \| (up|down|both) \|", TEXT, re.MULTILINE)


def test_message_table_names_every_message_once_with_its_way() -> None:
    up, down = set(typing.get_args(Upstream)), set(typing.get_args(Downstream))
    ways = {kind.__name__: "up" for kind in up - down}
    ways |= {kind.__name__: "down" for kind in down - up}
    ways |= {kind.__name__: "both" for kind in (up & down) | {Hello}}
    assert len(ROWS) == len(dict(ROWS))
    assert dict(ROWS) == ways


def test_diagrams_name_every_state() -> None:
    for state in [*Standing, *(phase for phase in Phase)]:
        assert state.name in TEXT


def test_flags_and_files_that_are_named_exist() -> None:
    parser = add_arguments(argparse.ArgumentParser(add_help=False))
    named = set(re.findall(r"--deadpool[\w-]*", TEXT))
    assert named <= set(parser._option_string_actions)
    files = re.findall(r"`((?:tools|deadpool|docs|tests)/[\w./]*)", TEXT)
    assert files and not [file for file in files if not (ROOT / file).exists()]


def test_bounds_that_have_a_relation_are_in_the_table() -> None:
    for relation in RELATIONS:
        assert re.search(rf"^\| `--deadpool-{relation.flag}` \|", TEXT, re.MULTILINE)
