"""Tokenizers over Hugging Face's `tokenizers` library; `transformers` only for other formats."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron.training.tokenizer import Tokenizer, existing_file, usage_error

_END_OF_TEXT_NAMES = ("<|endoftext|>", "</s>", "<|end_of_text|>", "<eos>", "[EOS]", "[SEP]")


class RustTokenizer(Tokenizer):
    """A `tokenizers.Tokenizer` with its end-of-text and padding tokens by name."""

    def __init__(
        self,
        backend: Any,
        *paths: str,
        end_of_text: str,
        padding: str | None = None,
        with_special_tokens: bool = False,
    ) -> None:
        super().__init__(*paths, with_special_tokens=with_special_tokens)
        self._backend = backend
        self._with_special_tokens = with_special_tokens
        self._pad = None if padding is None else backend.token_to_id(padding)
        eod = backend.token_to_id(end_of_text)
        if eod is None:
            raise usage_error(f"{paths[0]} has no token {end_of_text!r} to end documents with.")
        self.eod = eod

    @property
    def vocab_size(self) -> int:
        return self._backend.get_vocab_size(with_added_tokens=True)

    @property
    def pad(self) -> int:
        return super().pad if self._pad is None else self._pad

    def tokenize(self, text: str) -> list[int]:
        return self._backend.encode(text, add_special_tokens=self._with_special_tokens).ids

    def detokenize(self, ids: Sequence[int]) -> str:
        return self._backend.decode(list(ids), skip_special_tokens=True)


def build_gpt2_bpe(args: argparse.Namespace) -> Tokenizer:
    """GPT-2's byte-level BPE from `--vocab-file` and `--merge-file`. Raises UsageError."""
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models, pre_tokenizers

    vocab = existing_file(args, "vocab_file", args.tokenizer_type)
    merges = existing_file(args, "merge_file", args.tokenizer_type)
    end_of_text = "<|endoftext|>"
    try:
        backend = Backend(models.BPE.from_file(str(vocab), str(merges)))
    except Exception as error:  # tokenizers raises bare Exception
        raise usage_error(f"--vocab-file {vocab} and --merge-file {merges}: {error}") from None
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    # With --legacy-tokenizer, Megatron-LM reads the characters "<|endoftext|>" as ordinary text.
    legacy = getattr(args, "legacy_tokenizer", False)
    if not legacy and backend.token_to_id(end_of_text) is not None:
        backend.add_special_tokens([end_of_text])
    return RustTokenizer(backend, str(vocab), str(merges), end_of_text=end_of_text)


def build_hugging_face(args: argparse.Namespace) -> Tokenizer:
    """A tokenizer.json, or the folder with it, at `--tokenizer-model`. Raises UsageError.

    Special tokens come from the files beside it; a model without end-of-sentence token ends
    documents with its separator, as in Megatron-LM.
    """
    given = args.tokenizer_model
    if given is None:
        raise usage_error("--tokenizer-type HuggingFaceTokenizer needs --tokenizer-model PATH.")
    path = Path(given)
    file = path / "tokenizer.json" if path.is_dir() else path
    if file.is_file():
        backend, special = _read_tokenizer_json(file)
    else:
        backend, special = _load_with_transformers(given, args)
    extra = getattr(args, "tokenizer_special_tokens", None)
    if extra:
        backend.add_special_tokens(list(extra))
    end_of_text = special.get("eos_token") or special.get("sep_token")
    if end_of_text is None:
        known = (name for name in _END_OF_TEXT_NAMES if backend.token_to_id(name) is not None)
        end_of_text = next(known, None)
    if end_of_text is None:
        raise usage_error(
            f"--tokenizer-model {given} does not say which token ends a text: put a "
            f'tokenizer_config.json with "eos_token" beside {file.name}.'
        )
    return RustTokenizer(
        backend,
        given,
        end_of_text=end_of_text,
        padding=special.get("pad_token"),
        with_special_tokens=any(
            getattr(args, name, False)
            for name in ("tokenizer_hf_include_special_tokens", "legacy_tokenizer")
        ),
    )


def _read_tokenizer_json(file: Path) -> tuple[Any, dict[str, str]]:
    """The backend, and the special tokens that the files beside `file` name."""
    from tokenizers import Tokenizer as Backend

    try:
        backend = Backend.from_file(str(file))
    except Exception as error:  # tokenizers raises bare Exception
        raise usage_error(f"--tokenizer-model {file} is no tokenizer.json: {error}") from None
    backend.no_truncation()
    backend.no_padding()
    special: dict[str, str] = {}
    for name in ("special_tokens_map.json", "tokenizer_config.json"):
        config = file.parent / name
        if config.is_file():
            for key, value in _read_object(config).items():
                if key in ("eos_token", "sep_token", "pad_token") and value is not None:
                    special[key] = value["content"] if isinstance(value, dict) else value
    return backend, special


def _read_object(config: Path) -> dict[str, Any]:
    try:
        content = json.loads(config.read_text(encoding="utf-8"))
    except ValueError as error:
        raise usage_error(f"{config}: {error}") from None
    if not isinstance(content, dict):
        raise usage_error(f"{config} holds no JSON object.")
    return content


def _load_with_transformers(name: str, args: argparse.Namespace) -> tuple[Any, dict[str, str]]:
    try:
        from transformers import AutoTokenizer
    except ImportError:
        raise usage_error(
            f"--tokenizer-model {name}: no tokenizer.json there. Give that file or its folder, or "
            f"install transformers to load other formats and names."
        ) from None
    try:
        loaded = AutoTokenizer.from_pretrained(
            name, trust_remote_code=bool(getattr(args, "trust_remote_code", False))
        )
    except (OSError, ValueError) as error:
        raise usage_error(f"--tokenizer-model {name}: {error}") from None
    if not loaded.is_fast:
        raise usage_error(f"--tokenizer-model {name} has no tokenizers (fast) form.")
    names = ("eos_token", "sep_token", "pad_token")
    special = {key: getattr(loaded, key) for key in names if getattr(loaded, key, None)}
    return loaded.backend_tokenizer, special
