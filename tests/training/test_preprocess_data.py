"""preprocess_data: the files against bytes laid out by hand, and text that comes back unchanged."""

from __future__ import annotations

import gzip
import json
import os
import signal
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tools.preprocess_data import main

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = ["Call me Ishmael.", "\u00c9t\u00e9 \u732b\n\ttwo lines", "", "last \U0001f433"]


def write_lines(path: Path, documents: list[str], key: str = "text") -> Path:
    path.write_text("".join(json.dumps({key: text}) + "\n" for text in documents))
    return path


def run(*argv: str | Path, tokenizer: str = "ByteTokenizer") -> int:
    return main([*map(str, argv), "--tokenizer-type", tokenizer])


def test_byte_tokenizer_files_are_those_computed_by_hand(tmp_path: Path) -> None:
    lines = write_lines(tmp_path / "in.jsonl", ["ab", "", "\u00e9"])
    assert run("--input", lines, "--output-prefix", tmp_path / "out", "--append-eod") == 0
    tokens = [0x61, 0x62, 256, 0xC3, 0xA9, 256]
    assert (tmp_path / "out_text_document.bin").read_bytes() == struct.pack("<6H", *tokens)
    index = b"MMIDIDX\x00\x00" + struct.pack("<QB", 1, 8)  # version, code of uint16
    index += struct.pack("<QQ", 2, 4)  # sequences; documents and one
    index += struct.pack("<2i", 3, 3) + struct.pack("<2q", 0, 6)  # lengths; byte offsets
    index += struct.pack("<4q", 0, 1, 1, 2)  # the empty document has no sequence
    assert (tmp_path / "out_text_document.idx").read_bytes() == index
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "in.jsonl",
        "out_text_document.bin",
        "out_text_document.idx",
    ]


@pytest.mark.parametrize("workers", [1, 3])
def test_text_comes_back_byte_for_byte_in_order(tmp_path: Path, workers: int) -> None:
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    documents = [text * (1 + i % 7) for i, text in enumerate(DOCUMENTS * 100) if text]
    lines = write_lines(tmp_path / "in.jsonl", documents)
    argv = ("--input", lines, "--output-prefix", tmp_path / "out", "--workers", str(workers))
    assert run(*argv) == 0
    dataset = IndexedDataset(str(tmp_path / "out_text_document"))
    assert [bytes(ids.astype(np.uint8)).decode() for ids in dataset] == documents


def test_plain_text_is_one_document_a_file_whatever_its_bytes(tmp_path: Path) -> None:
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    folder = tmp_path / "sources"
    (folder / "sub").mkdir(parents=True)
    contents = [b"import os\r\n\n", bytes(range(256)), b"\xef\xbb\xbfwith a byte order mark"]
    for name, content in zip(("a.py", "sub/b.bin", "z.txt"), contents, strict=True):
        (folder / name).write_bytes(content)
    with gzip.open(folder / "zz.txt.gz", "wb") as stream:
        stream.write(b"packed")
    assert run("--input", folder, "--output-prefix", tmp_path / "new" / "out") == 0
    dataset = IndexedDataset(str(tmp_path / "new" / "out_text_document"))
    assert [bytes(ids.astype(np.uint8)) for ids in dataset] == [*contents, b"packed"]


def test_several_keys_and_sentences(tmp_path: Path) -> None:
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    lines = tmp_path / "in.data"  # taken for JSON lines by its first line
    lines.write_text('{"title": "T", "body": ["one", "two"]}\n\n{"title": "U", "body": ["x"]}\n')
    keys = ("--json-keys", "title", "body")
    assert run("--input", lines, "--output-prefix", tmp_path / "o", *keys, "--append-eod") == 0
    title, body = (IndexedDataset(str(tmp_path / f"o_{key}_document")) for key in keys[1:])
    assert [list(ids) for ids in title] == [[ord("T"), 256], [ord("U"), 256]]
    assert [list(ids) for ids in body] == [[*b"one"], [*b"two", 256], [*b"x", 256]]
    assert list(body.document_indices) == [0, 2, 3]


def test_null_tokenizer_writes_the_numbers_and_large_vocabularies_int32(tmp_path: Path) -> None:
    lines = write_lines(tmp_path / "in.jsonl", ["70000 1", "2"])
    argv = ("--input", lines, "--output-prefix", tmp_path / "o", "--vocab-size", "70001")
    assert run(*argv, tokenizer="NullTokenizer") == 0
    assert np.fromfile(tmp_path / "o_text_document.bin", np.int32).tolist() == [70000, 1, 2]


@pytest.mark.parametrize("workers", ["1", "2"])
@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"text": ', "in.jsonl:2: Expecting value"),
        ('["text"]', "in.jsonl:2: not a JSON object but list"),
        ('{"body": "x"}', "in.jsonl:2: no key 'text' (--json-keys); this line has: 'body'"),
        ('{"text": 7}', "in.jsonl:2: key 'text' holds int, not text"),
        ('{"text": "\\ud800"}', "in.jsonl:2: 'utf-8' codec can't encode"),
    ],
)
def test_bad_line_is_named_and_earlier_output_stays(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], line: str, message: str, workers: str
) -> None:
    lines = tmp_path / "in.jsonl"
    lines.write_text('{"text": "good"}\n' + line + "\n")
    for kind in ("bin", "idx"):
        (tmp_path / f"out_text_document.{kind}").write_text("earlier")
    argv = ("--input", lines, "--output-prefix", tmp_path / "out", "--workers", workers)
    assert run(*argv) == 1
    assert message in capsys.readouterr().err
    assert (tmp_path / "out_text_document.bin").read_text() == "earlier"
    assert len(list(tmp_path.iterdir())) == 3


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        (("--input", "/no/such*"), "--input /no/such*: no such file"),
        (("--input", __file__, "--tokenizer-type", "NullTokenizer"), "needs --vocab-size"),
        (("--input", __file__, "--split-sentences"), "--split-sentences: sentences are not split"),
        (("--input", __file__, "--workers", "0"), "must be at least 1, not 0"),
    ],
)
def test_unfit_flags_end_with_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], extra: tuple[str, ...], message: str
) -> None:
    argv = ["--output-prefix", str(tmp_path / "out"), *extra]
    if "--tokenizer-type" not in argv:
        argv += ["--tokenizer-type", "ByteTokenizer"]
    try:
        code = main(argv)
    except SystemExit as ended:  # argparse's own way out
        code = int(ended.code or 0)
    assert code == 2
    assert message in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_lone_surrogate_is_named_for_any_library(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from tokenizers import Tokenizer, models

    model = tmp_path / "tokenizer.json"
    Tokenizer(models.WordLevel({"</s>": 0}, unk_token="</s>")).save(str(model))
    lines = write_lines(tmp_path / "in.jsonl", ["fine", "\ud800"])
    argv = ("--input", lines, "--output-prefix", tmp_path / "out", "--tokenizer-model", model)
    assert run(*argv, tokenizer="HuggingFaceTokenizer") == 1
    assert "in.jsonl:2: 'utf-8' codec can't encode" in capsys.readouterr().err


def test_no_text_at_all_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = write_lines(tmp_path / "in.jsonl", ["", ""])
    assert run("--input", lines, "--output-prefix", tmp_path / "out") == 1
    assert "no text at all for text" in capsys.readouterr().err


@pytest.mark.timeout(120)
def test_script_terminated_midway_leaves_no_file(tmp_path: Path) -> None:
    """The script waits for a named pipe that nobody closes; SIGTERM must clean up and end it."""
    pipe = tmp_path / "in.jsonl"
    os.mkfifo(pipe)
    command = [
        sys.executable,
        str(ROOT / "tools" / "preprocess_data.py"),
        "--input-format",
        "jsonl",
    ]
    command += ["--input", str(pipe), "--output-prefix", str(tmp_path / "out")]
    command += ["--tokenizer-type", "ByteTokenizer", "--log-interval", "1"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    with os.fdopen(os.open(pipe, os.O_RDWR), "w") as stream:  # so, it waits for no reader
        for _ in range(100):
            stream.write(json.dumps({"text": "x" * 20000}) + "\n")
        stream.flush()
        assert process.stderr is not None
        while "Processed" not in process.stderr.readline():
            pass
        assert [p for p in tmp_path.iterdir() if p.suffix == ".partial"]
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGTERM
    assert list(tmp_path.iterdir()) == [pipe]
