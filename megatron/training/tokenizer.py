"""Tokenizers by Megatron-LM's names, each over its own library, read from local files.

`build_tokenizer(args)` gives what megatron-core's GPTDataset asks for: `vocab_size`, `eod`, `pad`
where there is one, and `unique_identifiers`, which becomes part of the dataset cache's key.
Text of a document never ends training or preprocessing with a wrong id: what a tokenizer cannot
encode raises `ValueError`; flags and files that do not fit raise `UsageError`.
"""

from __future__ import annotations

import argparse
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

TOKENIZER_TYPES = (
    "ByteTokenizer",
    "GPT2BPETokenizer",
    "GPTSentencePieceTokenizer",
    "HuggingFaceTokenizer",
    "Llama2Tokenizer",
    "NullTokenizer",
    "SentencePieceTokenizer",
)
"""What `--tokenizer-type` takes here. `ByteTokenizer` is ours, the others are Megatron-LM's."""

_UNSUPPORTED_TYPES = (
    "BertWordPieceCase",
    "BertWordPieceLowerCase",
    "MultimodalTokenizer",
    "NullMultimodalTokenizer",
    "SFTTokenizer",
    "TikTokenizer",
)


def usage_error(message: str) -> Exception:
    """Imported late: `arguments` may itself import this module."""
    from megatron.training.arguments.errors import UsageError

    return UsageError(message)


class Tokenizer(ABC):
    """Text to token ids and back. One a process; not shared between threads."""

    eod: int
    """Id written after a document (`--append-eod`) and looked for by GPTDataset's masks."""

    takes_any_bytes = False
    """Whether `tokenize` takes bytes that are no UTF-8, as surrogate escapes."""

    def __init__(self, *paths: str, **options: Any) -> None:
        self.unique_identifiers: OrderedDict[str, Any] = OrderedDict()
        self.unique_identifiers["class"] = type(self).__name__
        self.unique_identifiers["tokenizer_path"] = list(paths)
        for name, value in options.items():
            self.unique_identifiers[name] = str(value)

    @property
    @abstractmethod
    def vocab_size(self) -> int:
        """Number of ids, special ones included, before padding."""

    @property
    def pad(self) -> int:
        """Padding id. Raises AttributeError where there is none: GPTDataset then masks nothing."""
        raise AttributeError(f"{type(self).__name__} has no padding token")

    @abstractmethod
    def tokenize(self, text: str) -> list[int]:
        """Ids of one document's text, without EOD. Raises ValueError for text it cannot encode."""

    @abstractmethod
    def detokenize(self, ids: Sequence[int]) -> str:
        """Text of the ids."""


class ByteTokenizer(Tokenizer):
    """Ids 0 to 255 are the bytes of the UTF-8 text, 256 is EOD.

    Bytes that are no UTF-8 travel as Python's surrogate escapes, so that any file goes through
    byte for byte (`open(..., errors="surrogateescape")`).
    """

    eod = 256
    takes_any_bytes = True

    @property
    def vocab_size(self) -> int:
        return 257

    def tokenize(self, text: str) -> list[int]:
        return list(text.encode("utf-8", errors="surrogateescape"))

    def detokenize(self, ids: Sequence[int]) -> str:
        return bytes(i for i in ids if i < self.eod).decode("utf-8", errors="surrogateescape")


class NullTokenizer(Tokenizer):
    """For data that is numbers already: ids 0 to N-1 written out in decimal, EOD is N.

    `num_ids` is `--vocab-size`, which does not count EOD (as in Megatron-LM).
    """

    def __init__(self, num_ids: int) -> None:
        super().__init__(vocab_size=num_ids)
        self.eod = num_ids

    @property
    def vocab_size(self) -> int:
        return self.eod + 1

    def tokenize(self, text: str) -> list[int]:
        ids = [int(word) for word in text.split()]
        for value in ids:
            if not 0 <= value < self.vocab_size:
                raise ValueError(f"token id {value} is outside 0 to {self.vocab_size - 1}")
        return ids

    def detokenize(self, ids: Sequence[int]) -> str:
        return " ".join(str(i) for i in ids)


class SentencePieceTokenizer(Tokenizer):
    """A SentencePiece model. EOD is its end-of-sentence piece.

    Megatron-LM 0.16.1 sizes the model of `--tokenizer-type SentencePieceTokenizer` (and of no
    other) for special ids after the model's own; `num_reserved` counts them. `with_begin` puts the
    begin-of-sentence piece first, as Megatron-LM's Llama2Tokenizer does with --legacy-tokenizer.
    """

    def __init__(
        self, path: str, *, reserve: bool, num_extra_ids: int = 0, with_begin: bool = False
    ) -> None:
        super().__init__(path, reserve=reserve, num_extra_ids=num_extra_ids, with_begin=with_begin)
        from sentencepiece import SentencePieceProcessor

        try:
            self._model = SentencePieceProcessor(model_file=path)
        except (OSError, RuntimeError) as error:
            raise usage_error(
                f"--tokenizer-model {path} is no SentencePiece model: {error}"
            ) from None
        self.eod = self._model.eos_id()
        if self.eod < 0:
            raise usage_error(f"--tokenizer-model {path} has no end-of-sentence piece.")
        self._begin = [self._model.bos_id()] if with_begin else []
        self.num_reserved = self._count_reserved(num_extra_ids) if reserve else 0

    def _count_reserved(self, num_extra_ids: int) -> int:
        model = self._model
        names = {"<CLS>", "<SEP>", "<EOD>", "<MASK>"}
        names.update(f"<extra_id_{i}>" for i in range(num_extra_ids))
        names.update({"<PAD>"} if model.pad_id() < 0 else ())
        names.update({"<BOS>"} if model.bos_id() < 0 else ())
        return len(names - {model.id_to_piece(i) for i in range(model.get_piece_size())})

    @property
    def vocab_size(self) -> int:
        return self._model.get_piece_size() + self.num_reserved

    @property
    def pad(self) -> int:
        pad = self._model.pad_id()
        return super().pad if pad < 0 else pad

    def tokenize(self, text: str) -> list[int]:
        return self._begin + self._model.encode(text)

    def detokenize(self, ids: Sequence[int]) -> str:
        return self._model.decode([int(i) for i in ids if i < self._model.get_piece_size()])


def build_tokenizer(args: argparse.Namespace) -> Tokenizer:
    """The tokenizer that `--tokenizer-type` and its companions name.

    Raises UsageError for a missing or unfit flag or file. Local to the rank: no collective, no
    network (unless a Hugging Face name is given and `transformers` is installed).
    """
    kind = args.tokenizer_type
    if kind in _UNSUPPORTED_TYPES:
        raise usage_error(
            f"--tokenizer-type {kind} is Megatron-LM's but not supported here; "
            f"choose from {', '.join(TOKENIZER_TYPES)}."
        )
    if kind == "ByteTokenizer":
        return ByteTokenizer()
    if kind == "NullTokenizer":
        if not args.vocab_size or args.vocab_size < 1:
            raise usage_error(
                f"--tokenizer-type NullTokenizer needs --vocab-size N with N of at least 1, "
                f"the number of ids without EOD; given: {args.vocab_size}."
            )
        return NullTokenizer(args.vocab_size)
    if getattr(args, "tokenizer_sentencepiece_legacy", False) or (
        kind == "SentencePieceTokenizer" and getattr(args, "legacy_tokenizer", False)
    ):
        raise usage_error(
            "SentencePiece tokenizers find no special tokens in text here: leave out "
            "--tokenizer-sentencepiece-legacy and --legacy-tokenizer."
        )
    if kind in ("GPT2BPETokenizer", "HuggingFaceTokenizer"):
        from megatron.training import tokenizer_hugging_face as hugging_face

        build = hugging_face.build_gpt2_bpe if kind[0] == "G" else hugging_face.build_hugging_face
        return build(args)
    if kind in ("SentencePieceTokenizer", "GPTSentencePieceTokenizer", "Llama2Tokenizer"):
        path = existing_file(args, "tokenizer_model", kind)
        return SentencePieceTokenizer(
            str(path),
            reserve=kind == "SentencePieceTokenizer",
            num_extra_ids=getattr(args, "vocab_extra_ids", 0),
            with_begin=kind == "Llama2Tokenizer" and getattr(args, "legacy_tokenizer", False),
        )
    raise usage_error(
        f"--tokenizer-type {kind} is unknown; choose from {', '.join(TOKENIZER_TYPES)}."
    )


def padded_vocab_size(orig_vocab_size: int, args: argparse.Namespace) -> int:
    """Rows of the embedding: the next multiple of --make-vocab-size-divisible-by times TP.

    `--padded-vocab-size`, where given, is taken instead once it fits. Raises UsageError.
    """
    tensor_parallel = args.tensor_model_parallel_size
    given = getattr(args, "padded_vocab_size", None)
    if given is not None:
        if given < orig_vocab_size or given % tensor_parallel:
            raise usage_error(
                f"--padded-vocab-size {given} does not fit: it must be at least the tokenizer's "
                f"{orig_vocab_size} and a multiple of --tensor-model-parallel-size "
                f"{tensor_parallel}."
            )
        return given
    multiple = args.make_vocab_size_divisible_by * tensor_parallel
    return -(-orig_vocab_size // multiple) * multiple


def existing_file(args: argparse.Namespace, name: str, kind: str) -> Path:
    """The file that flag `name` gives. Raises UsageError where it is missing."""
    flag = "--" + name.replace("_", "-")
    given = getattr(args, name, None)
    if given is None:
        raise usage_error(f"--tokenizer-type {kind} needs {flag} PATH.")
    if not Path(given).exists():
        raise usage_error(f"{flag} {given}: no such file.")
    return Path(given)
