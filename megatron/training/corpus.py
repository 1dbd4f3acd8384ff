"""Text files read document by document and encoded by several processes, for preprocessing.

Imports no torch: worker processes start in a tenth of a second.
"""

from __future__ import annotations

import argparse
import glob
import gzip
import json
import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, cast

from megatron.training.tokenizer import Tokenizer, build_tokenizer, usage_error

CHUNK_BYTES = 1 << 20
"""How much text a worker is handed at once."""


class InputError(Exception):
    """A document cannot be encoded; the text begins with file and line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    """One document still to be read and encoded. Travels to a worker process."""

    source: str
    """`file:line`, or the file alone, for error messages."""
    line: bytes | None
    """A JSON line, or None: the whole file `source` is the text."""
    num_bytes: int


@dataclass(slots=True, kw_only=True)
class Encoded:
    """A document's ids by key. `lengths` are those of its sequences (one, or one a sentence)."""

    num_bytes: int
    ids: dict[str, list[int]] = field(default_factory=dict)
    lengths: dict[str, list[int]] = field(default_factory=dict)


class Encoder:
    """Reads and tokenizes documents; made anew in each worker process."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.tokenizer: Tokenizer = build_tokenizer(args)
        self._keys: list[str] = args.json_keys
        self._append_eod: bool = args.append_eod

    def encode(self, documents: Sequence[Document]) -> list[Encoded]:
        """Raises InputError naming the first document that cannot be encoded."""
        return [self._encode_one(document) for document in documents]

    def _encode_one(self, document: Document) -> Encoded:
        encoded = Encoded(num_bytes=document.num_bytes)
        try:
            for key, sequences in self._read(document).items():
                ids, lengths = self._tokenize(sequences)
                encoded.ids[key] = ids
                encoded.lengths[key] = lengths
        except (ValueError, TypeError, OSError) as error:
            raise InputError(f"{document.source}: {error}") from None
        return encoded

    def _read(self, document: Document) -> dict[str, list[str]]:
        if document.line is None:
            if len(self._keys) > 1:
                raise ValueError("plain text has no keys: give --json-keys one name")
            with _open(Path(document.source)) as stream:
                content = stream.read()
            errors = "surrogateescape" if self.tokenizer.takes_any_bytes else "strict"
            return {self._keys[0]: [content.decode("utf-8", errors=errors)]}
        record = json.loads(document.line)
        if not isinstance(record, dict):
            raise ValueError(f"not a JSON object but {type(record).__name__}")
        return {key: _texts(record, key) for key in self._keys}

    def _tokenize(self, sequences: list[str]) -> tuple[list[int], list[int]]:
        ids: list[int] = []
        lengths: list[int] = []
        for text in sequences:
            if not self.tokenizer.takes_any_bytes:
                text.encode("utf-8")  # a lone surrogate gets the same error from every library
            sequence = self.tokenizer.tokenize(text)
            if sequence:
                ids.extend(sequence)
                lengths.append(len(sequence))
        if ids and self._append_eod:
            ids.append(self.tokenizer.eod)
            lengths[-1] += 1
        return ids, lengths


def _texts(record: dict[str, Any], key: str) -> list[str]:
    if key not in record:
        keys = ", ".join(map(repr, record)) or "none"
        raise ValueError(f"no key {key!r} (--json-keys); this line has: {keys}")
    value = record[key]
    texts = value if isinstance(value, list) else [value]
    for text in texts:
        if not isinstance(text, str):
            raise ValueError(f"key {key!r} holds {type(text).__name__}, not text")
    return texts


_worker_encoder: Encoder | None = None


def _start_worker(args: argparse.Namespace) -> None:
    global _worker_encoder
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    _worker_encoder = Encoder(args)


def _end_with_parent() -> None:
    """A killed parent closes nothing that a waiting pool worker would notice."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _encode_in_worker(documents: Sequence[Document]) -> list[Encoded]:
    assert _worker_encoder is not None
    return _worker_encoder.encode(documents)


def find_files(given: Sequence[str]) -> list[Path]:
    """The files that `--input` names: files, folders (all files below) and glob patterns.

    Sorted within each folder and pattern. Raises UsageError for a name that gives none.
    """
    found: list[Path] = []
    for name in given:
        path = Path(name)
        if path.is_dir():
            files = sorted(p for p in path.rglob("*") if p.is_file())
        elif path.exists():
            files = [path]
        else:
            files = sorted(Path(p) for p in glob.glob(name, recursive=True) if Path(p).is_file())
        if not files:
            raise usage_error(f"--input {name}: no such file, folder with files, or pattern.")
        found.extend(files)
    return found


def holds_json_lines(file: Path) -> bool:
    """By its name (.jsonl, .json, also .gz), else by a first line that is a JSON object.

    A pipe does: looking into it would lose the line.
    """
    suffixes = file.suffixes[-2:] if file.suffix == ".gz" else file.suffixes[-1:]
    if not file.is_file() or (suffixes and suffixes[0] in (".jsonl", ".json")):
        return True
    with _open(file) as stream:
        first = stream.readline(CHUNK_BYTES)
    try:
        return isinstance(json.loads(first), dict)
    except ValueError:
        return False


def _open(file: Path) -> BinaryIO:
    return cast(BinaryIO, gzip.open(file, "rb")) if file.suffix == ".gz" else file.open("rb")


def documents_of(files: Sequence[Path], input_format: str) -> Iterator[Document]:
    """Every document in order. Blank lines between JSON lines are none."""
    for file in files:
        if input_format == "text" or (input_format == "auto" and not holds_json_lines(file)):
            yield Document(source=str(file), line=None, num_bytes=file.stat().st_size)
            continue
        with _open(file) as stream:
            for number, line in enumerate(stream, start=1):
                if line.strip():
                    yield Document(source=f"{file}:{number}", line=line, num_bytes=len(line))


def chunks_of(documents: Iterable[Document]) -> Iterator[list[Document]]:
    """Documents in order, bundled to about CHUNK_BYTES of text."""
    chunk: list[Document] = []
    num_bytes = 0
    for document in documents:
        chunk.append(document)
        num_bytes += document.num_bytes
        if num_bytes >= CHUNK_BYTES:
            yield chunk
            chunk, num_bytes = [], 0
    if chunk:
        yield chunk


def encode_all(
    documents: Iterable[Document], encoder: Encoder, args: argparse.Namespace
) -> Iterator[Encoded]:
    """Encoded documents in input order, by `--workers` processes; one works without any.

    At most four chunks a worker are in flight, so that memory does not grow with the input.
    """
    if args.workers == 1:
        for chunk in chunks_of(documents):
            yield from encoder.encode(chunk)
        return
    waiting: deque[Future[list[Encoded]]] = deque()
    pool = ProcessPoolExecutor(
        args.workers,
        mp_context=multiprocessing.get_context("spawn"),
        initializer=_start_worker,
        initargs=(args,),
    )
    try:
        for chunk in chunks_of(documents):
            waiting.append(pool.submit(_encode_in_worker, chunk))
            if len(waiting) >= 4 * args.workers:
                yield from waiting.popleft().result()
        while waiting:
            yield from waiting.popleft().result()
    except BrokenProcessPool:
        raise InputError("a worker process died (out of memory?); try fewer --workers") from None
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
