"""Rules about data, tokenizer and evaluation: files must exist before a rank waits for another."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Sequence
from pathlib import Path

from megatron.training.arguments.errors import UsageError

DEFAULT_TOKENIZER = "GPT2BPETokenizer"
LEGACY_SPLIT = "969, 30, 1"
"""What --data-path is split by when --split is not given, as in Megatron-LM."""
SUPPORTED_TOKENIZERS = (
    "ByteTokenizer",
    "NullTokenizer",
    "GPT2BPETokenizer",
    "HuggingFaceTokenizer",
    "SentencePieceTokenizer",
    "GPTSentencePieceTokenizer",
    "Llama2Tokenizer",
)
NEEDED_FILES = {
    "GPT2BPETokenizer": ("vocab_file", "merge_file"),
    "SentencePieceTokenizer": ("tokenizer_model",),
    "GPTSentencePieceTokenizer": ("tokenizer_model",),
    "Llama2Tokenizer": ("tokenizer_model",),
}
UNUSED_EVAL_INTERVAL = 1000
"""Stands in for --eval-interval when nothing is evaluated."""


def check_data(args: argparse.Namespace) -> None:
    """Exactly one source of data, all its files in place; sets `split` and `dataloader_type`."""
    source = _only_source(args)
    _check_source(args, source)
    if args.split is None and source not in ("per_split", "split_file"):
        args.split = LEGACY_SPLIT
        args.notes.append(f'--split is not given: using "{LEGACY_SPLIT}", as Megatron-LM does')
    if args.split is not None:
        _check_split(args.split)
    if args.dataloader_type is None:
        args.dataloader_type = "single"
    if args.dataloader_type == "external":
        raise UsageError("--dataloader-type external is not supported: use single or cyclic")
    for name in ("num_dataset_builder_threads", "num_workers"):
        least = 0 if name == "num_workers" else 1
        if getattr(args, name) < least:
            flag = name.replace("_", "-")
            raise UsageError(f"--{flag} {getattr(args, name)}: must be at least {least}")
    if args.per_dataset_sequences_path is not None:
        _read(args.per_dataset_sequences_path, "--per-dataset-sequences-path")


def _check_source(args: argparse.Namespace, source: str) -> None:
    if source in ("per_split", "split_file") and args.split is not None:
        raise UsageError(
            f"--split {args.split} divides --data-path; where training, validation and test have "
            "paths of their own, leave it out"
        )
    if source == "per_split":
        for name in ("train_data_path", "valid_data_path", "test_data_path"):
            if getattr(args, name) is not None:
                _check_prefixes(f"--{name.replace('_', '-')}", getattr(args, name))
    elif source == "data_path":
        _check_prefixes("--data-path", args.data_path)
    elif source == "data_args_path":
        words = _read(args.data_args_path, "--data-args-path").split()
        _check_prefixes(f"--data-args-path {args.data_args_path}", words)
    elif source == "split_file":
        _check_split_file(args.per_split_data_args_path)


def _only_source(args: argparse.Namespace) -> str:
    per_split = ("train_data_path", "valid_data_path", "test_data_path")
    given = {
        "--mock-data": ("mock_data", args.mock_data),
        "--data-path": ("data_path", args.data_path is not None),
        "--data-args-path": ("data_args_path", args.data_args_path is not None),
        "--train-data-path, --valid-data-path or --test-data-path": (
            "per_split",
            any(getattr(args, name) is not None for name in per_split),
        ),
        "--per-split-data-args-path": ("split_file", args.per_split_data_args_path is not None),
    }
    chosen = [flag for flag, (_, present) in given.items() if present]
    if not chosen:
        raise UsageError(
            "no data: type --data-path PREFIX (the path of a .bin/.idx pair without its ending), "
            "--train-data-path and its companions, or --mock-data"
        )
    if len(chosen) > 1:
        raise UsageError(f"{' and '.join(chosen)} name different data: keep one of them")
    return given[chosen[0]][0]


def _check_prefixes(flag: str, words: Sequence[str]) -> None:
    """`words`: prefixes, or weights and prefixes by turns."""
    if not words:
        raise UsageError(f"{flag} is empty: give the path of a .bin/.idx pair without its ending")
    weighted = len(words) > 1 and _is_number(words[0])
    if weighted and len(words) % 2:
        raise UsageError(
            f"{flag} begins with a weight, so weights and prefixes must come by turns; given "
            f"{len(words)} words"
        )
    if weighted:
        for weight in words[::2]:
            if not _is_number(weight):
                raise UsageError(f"{flag}: expected a weight, given {weight!r}")
    missing = [
        file
        for prefix in (words[1::2] if weighted else words)
        for file in (f"{prefix}.bin", f"{prefix}.idx")
        if not Path(file).is_file()
    ]
    if missing:
        raise UsageError(
            f"{flag}: no such file: {', '.join(missing)} (a prefix names a .bin/.idx pair without "
            "its ending; tools/preprocess_data.py makes one)"
        )


def _is_number(word: str) -> bool:
    try:
        float(word)
    except ValueError:
        return False
    return True


def _check_split_file(path: str) -> None:
    flag = "--per-split-data-args-path"
    try:
        parts = json.loads(_read(path, flag))
    except ValueError as error:
        raise UsageError(f"{flag} {path} is not JSON: {error}") from error
    for split in ("train", "valid", "test"):
        if split not in parts:
            raise UsageError(f"{flag} {path} lacks the key {split!r}: it needs train, valid, test")
        words = parts[split]
        words = words.split() if isinstance(words, str) else words
        if words:
            _check_prefixes(f"{flag} {path}, {split}", [str(word) for word in words])


def _read(path: str, flag: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{flag} {path} cannot be read: {error.strerror}") from error


def _check_split(split: str) -> None:
    shares = split.replace("/", ",").split(",")
    numbers = [float(share) for share in shares if _is_number(share)]
    fits = len(numbers) == len(shares) <= 3 and min(numbers) >= 0 and sum(numbers) > 0
    if not fits:
        raise UsageError(f"--split {split!r}: give up to three shares, none below 0, as 969,30,1")


def check_tokenizer(args: argparse.Namespace) -> None:
    """The tokenizer is a supported one and its files exist; sets `tokenizer_type`."""
    if args.tokenizer_type is None:
        args.tokenizer_type = DEFAULT_TOKENIZER
    kind = args.tokenizer_type
    if kind not in SUPPORTED_TOKENIZERS:
        raise UsageError(
            f"--tokenizer-type {kind} is not supported: use {', '.join(SUPPORTED_TOKENIZERS)}"
        )
    if kind == "NullTokenizer" and (args.vocab_size is None or args.vocab_size < 1):
        raise UsageError(
            "--tokenizer-type NullTokenizer needs --vocab-size: the number of token ids in the data"
        )
    if kind == "HuggingFaceTokenizer" and args.tokenizer_model is None:
        raise UsageError(
            "--tokenizer-type HuggingFaceTokenizer needs --tokenizer-model: a tokenizer.json, or "
            "a folder that holds one"
        )
    typed = "tokenizer_type" in args.typed
    _check_files(args, NEEDED_FILES.get(kind, ()), kind if typed else f"{kind} (the default)")
    if args.make_vocab_size_divisible_by < 1:
        given = args.make_vocab_size_divisible_by
        raise UsageError(f"--make-vocab-size-divisible-by {given}: must be at least 1")


def _check_files(args: argparse.Namespace, names: Iterable[str], kind: str) -> None:
    for name in names:
        flag, given = f"--{name.replace('_', '-')}", getattr(args, name)
        if given is None:
            raise UsageError(
                f"--tokenizer-type {kind} needs {flag} (or choose another tokenizer: "
                f"{', '.join(SUPPORTED_TOKENIZERS)})"
            )
        if not Path(given).exists():
            raise UsageError(f"{flag} {given}: no such file")


def check_evaluation(args: argparse.Namespace) -> None:
    """How often and how long to evaluate; sets `eval_interval` where nothing is evaluated."""
    if args.eval_iters < 0:
        raise UsageError(f"--eval-iters {args.eval_iters}: must be at least 0")
    if args.eval_interval is None:
        if args.eval_iters > 0 and not args.skip_train:
            raise UsageError(
                f"missing --eval-interval: say how often to evaluate for --eval-iters "
                f"{args.eval_iters} iterations, or type --eval-iters 0"
            )
        args.eval_interval = UNUSED_EVAL_INTERVAL
    if args.skip_train and not args.no_load_optim:
        args.no_load_optim = True
        args.notes.append("--skip-train: the optimizer is not loaded")
