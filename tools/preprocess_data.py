"""Turns text into the .bin/.idx pair that GPTDataset reads, with Megatron-LM's flags.

    python tools/preprocess_data.py --input corpus.jsonl --output-prefix data/corpus \\
        --tokenizer-type HuggingFaceTokenizer --tokenizer-model tokenizer.json \\
        --append-eod --workers 8

writes data/corpus_text_document.bin and .idx, the prefix to give to --data-path. Input is JSON
lines (one document a line) or plain text (one document a file); documents keep the input's order.
Exit code 1: a document cannot be read, named with its file and line; 2: flags that do not fit.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron.training.corpus import (
    Encoded,
    Encoder,
    InputError,
    documents_of,
    encode_all,
    find_files,
)


class PairWriter:
    """Writes one .bin/.idx pair under temporary names and renames it when it is complete.

    An earlier pair of the same name is replaced; at no moment do a .bin and an .idx stand beside
    each other that do not belong together.
    """

    def __init__(self, prefix: Path, dtype: Any) -> None:
        from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

        self._final = {kind: Path(f"{prefix}.{kind}") for kind in ("bin", "idx")}
        self._partial = {
            kind: path.with_name(f".{path.name}.{os.getpid()}.partial")
            for kind, path in self._final.items()
        }
        self._builder = IndexedDatasetBuilder(str(self._partial["bin"]), dtype=dtype)
        self.prefix = prefix
        self.num_tokens = 0

    def add(self, ids: list[int], lengths: list[int]) -> None:
        """Append a document (none of its tokens, where the text was empty)."""
        self._builder.add_document(ids, lengths)
        self.num_tokens += len(ids)

    def finish(self) -> None:
        """Complete both files on disk, then give them their names."""
        self._builder.finalize(str(self._partial["idx"]))
        for partial in self._partial.values():
            with partial.open("rb") as stream:
                os.fsync(stream.fileno())
        self._final["idx"].unlink(missing_ok=True)
        for kind in ("bin", "idx"):
            self._partial[kind].replace(self._final[kind])

    def discard(self) -> None:
        """Remove what is not complete. Harmless after `finish`."""
        self._builder.data_file.close()
        for partial in self._partial.values():
            partial.unlink(missing_ok=True)


class Progress:
    """Megatron-LM's progress line on stderr, every `interval` documents."""

    def __init__(self, interval: int) -> None:
        self._interval = interval
        self._start = time.monotonic()
        self.num_documents = 0
        self.num_bytes = 0

    def count(self, encoded: Encoded) -> None:
        self.num_documents += 1
        self.num_bytes += encoded.num_bytes
        if self.num_documents % self._interval == 0:
            elapsed = max(time.monotonic() - self._start, 1e-9)
            print(
                f"Processed {self.num_documents} documents "
                f"({self.num_documents / elapsed:.1f} docs/s, "
                f"{self.num_bytes / elapsed / 2**20:.2f} MB/s).",
                file=sys.stderr,
            )


def build_parser() -> argparse.ArgumentParser:
    """Megatron-LM's flags; the tokenizer's are the training script's own."""
    from megatron.training.arguments.flags_run import TOKENIZER

    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    data = parser.add_argument_group("input and output")
    data.add_argument("--input", nargs="+", required=True, help="files, folders or patterns")
    data.add_argument(
        "--input-format",
        choices=("auto", "jsonl", "text"),
        default="auto",
        help="auto: .jsonl and .json (also .gz) and files that begin with a JSON object are JSON "
        "lines, others plain text",
    )
    data.add_argument("--json-keys", nargs="+", default=["text"], help="keys to take the text from")
    data.add_argument("--output-prefix", required=True, help="files: PREFIX_KEY_document.bin, .idx")
    data.add_argument("--append-eod", action="store_true", help="end each document with EOD")
    run = parser.add_argument_group("run")
    run.add_argument("--workers", type=_positive, default=1, help="processes that tokenize")
    run.add_argument("--log-interval", type=_positive, default=1000, help="documents a log line")
    run.add_argument(
        "--partitions", type=_positive, default=1, help="accepted; --workers alone share the work"
    )
    run.add_argument(
        "--keep-sequential-samples", action="store_true", help="accepted: the order is always kept"
    )
    tokenizer = parser.add_argument_group("tokenizer")
    for flag in TOKENIZER:
        flag.add_to(tokenizer)
    for name in ("--split-sentences", "--keep-newlines"):
        parser.add_argument(name, action=_Refused, nargs=0, help=argparse.SUPPRESS)
    parser.add_argument("--lang", action=_Refused, help=argparse.SUPPRESS)
    return parser


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, not {value}")
    return value


class _Refused(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> NoReturn:
        parser.error(
            f"{'/'.join(self.option_strings)}: sentences are not split here (GPT data needs whole "
            f"documents). Split beforehand: a list of strings under the JSON key is a document "
            f"of as many sequences."
        )


def preprocess(args: argparse.Namespace) -> None:
    """Do what the flags say. Raises UsageError and InputError; then no output file is touched."""
    from megatron.core.datasets.indexed_dataset import DType

    files = find_files(args.input)
    encoder = Encoder(args)
    dtype = DType.optimal_dtype(encoder.tokenizer.vocab_size)
    Path(args.output_prefix).parent.mkdir(parents=True, exist_ok=True)
    progress = Progress(args.log_interval)
    with contextlib.ExitStack() as cleanup:
        writers = {}
        for key in args.json_keys:
            writers[key] = PairWriter(Path(f"{args.output_prefix}_{key}_document"), dtype)
            cleanup.callback(writers[key].discard)
        for encoded in encode_all(documents_of(files, args.input_format), encoder, args):
            for key, ids in encoded.ids.items():
                writers[key].add(ids, encoded.lengths[key])
            progress.count(encoded)
        empty = [key for key, writer in writers.items() if writer.num_tokens == 0]
        if empty:
            raise InputError(f"{', '.join(args.input)}: no text at all for {', '.join(empty)}")
        for writer in writers.values():
            writer.finish()
    for writer in writers.values():
        print(
            f"wrote {writer.prefix}.bin and .idx: {progress.num_documents} documents, "
            f"{writer.num_tokens} tokens, {dtype.__name__}"
        )


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code of the command."""
    from megatron.training.arguments.errors import UsageError

    args = build_parser().parse_args(argv)
    args.tokenizer_type = args.tokenizer_type or "GPT2BPETokenizer"
    try:
        preprocess(args)
    except UsageError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except InputError as error:
        print(f"error: {error}; nothing was written", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted; nothing was written", file=sys.stderr)
        return 128 + signal.SIGINT
    return 0


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    sys.exit(main())
