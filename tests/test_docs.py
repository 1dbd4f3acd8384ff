"""docs/ names what the code has, and its figures are the code's."""

from __future__ import annotations

import argparse
import re
import typing
from pathlib import Path

import pytest

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


def test_table_of_memory_is_what_the_code_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    import memory_table

    text = (ROOT / "docs" / "memory.md").read_text(encoding="utf-8")
    assert memory_table.table() in text
    # Against what the models' authors say of their size, and 12 bytes a parameter by hand.
    published = {"GPT-2 small": 0.124, "GPT-2 XL": 1.558, "7B": 6.74, "13B": 13.02, "65B": 65.29}
    rows = re.findall(
        r"^\| (.+?) \| ([\d.]+) B \| \w+ \| \d+ \| tp (\d+), pp (\d+), dp (\d+) \| (yes|no) "
        r"\| ([\d.]+) GiB \|",
        text,
        re.MULTILINE,
    )
    assert len(rows) == len(memory_table.CASES)
    for name, billions, tensor, pipeline, data, distributed, snapshot in rows:
        assert abs(float(billions) - published[name]) < 0.005
        share = int(tensor) * int(pipeline) * (int(data) if distributed == "yes" else 1)
        by_hand = 12 * published[name] * 1e9 / share / 2**30
        # Stages with an embedding or an output layer have more than their share.
        most = by_hand * (1.5 if int(pipeline) > 1 else 1.01) + 0.01
        assert by_hand - 0.01 < float(snapshot) < most


def test_memory_document_says_the_codes_constants() -> None:
    from deadpool.arena import METADATA_BYTES
    from deadpool.node_memory import RESERVE_BYTES, RESERVE_BYTES_CUDA
    from deadpool.protocol.snapshots import NUM_BUFFERS

    text = (ROOT / "docs" / "memory.md").read_text(encoding="utf-8")
    assert f"r x {NUM_BUFFERS} buffers" in text
    assert f"{METADATA_BYTES >> 10} KiB for metadata" in text
    assert f"{RESERVE_BYTES >> 20} MiB a rank on CPUs and {RESERVE_BYTES_CUDA >> 30} GiB" in text
