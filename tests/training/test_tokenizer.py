"""Tokenizers: ids against hand-computed and independently computed ones; every misuse named."""

from __future__ import annotations

import json
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

from megatron.training.arguments.errors import UsageError
from megatron.training.tokenizer import build_tokenizer, padded_vocab_size

TEXT = "Call me Ishmael. \u00c9t\u00e9 na\u00efve \u732b\n\tx = {1: 'two'}  \n"


def flags(kind: str, **given: Any) -> Namespace:
    defaults: dict[str, Any] = {
        "tokenizer_type": kind,
        "tokenizer_model": None,
        "vocab_file": None,
        "merge_file": None,
        "vocab_size": None,
        "make_vocab_size_divisible_by": 128,
        "tensor_model_parallel_size": 1,
    }
    return Namespace(**(defaults | given))


def test_byte_tokenizer_ids_are_the_bytes_and_eod_is_256() -> None:
    tokenizer = build_tokenizer(flags("ByteTokenizer"))
    assert tokenizer.tokenize("a\u00e9") == [0x61, 0xC3, 0xA9]
    assert (tokenizer.eod, tokenizer.vocab_size) == (256, 257)
    assert tokenizer.detokenize([*tokenizer.tokenize(TEXT), tokenizer.eod]) == TEXT


def test_byte_tokenizer_any_bytes_go_through_unchanged() -> None:
    tokenizer = build_tokenizer(flags("ByteTokenizer"))
    every_byte = bytes(range(256))
    text = every_byte.decode("utf-8", errors="surrogateescape")
    assert bytes(tokenizer.tokenize(text)) == every_byte


def test_byte_tokenizer_lone_surrogate_is_refused() -> None:
    with pytest.raises(ValueError, match="surrogates"):
        build_tokenizer(flags("ByteTokenizer")).tokenize("\ud800")


def test_null_tokenizer_eod_follows_the_vocabulary() -> None:
    tokenizer = build_tokenizer(flags("NullTokenizer", vocab_size=256))
    assert (tokenizer.eod, tokenizer.vocab_size) == (256, 257)
    assert tokenizer.tokenize("0 255 7") == [0, 255, 7]
    assert tokenizer.detokenize([0, 255, 7]) == "0 255 7"
    with pytest.raises(ValueError, match="token id 257 is outside 0 to 256"):
        tokenizer.tokenize("257")


@pytest.mark.parametrize(
    ("orig", "multiple", "tensor_parallel", "padded"),
    [(257, 128, 1, 384), (257, 128, 2, 512), (256, 128, 2, 256), (50257, 128, 8, 51200)],
)
def test_padded_vocab_size_is_the_next_multiple(
    orig: int, multiple: int, tensor_parallel: int, padded: int
) -> None:
    args = flags(
        "NullTokenizer",
        make_vocab_size_divisible_by=multiple,
        tensor_model_parallel_size=tensor_parallel,
    )
    assert padded_vocab_size(orig, args) == padded


def test_padded_vocab_size_given_one_must_fit() -> None:
    args = flags("NullTokenizer", padded_vocab_size=300, tensor_model_parallel_size=2)
    assert padded_vocab_size(257, args) == 300
    for unfit in (256, 301):
        args.padded_vocab_size = unfit
        with pytest.raises(UsageError, match=f"--padded-vocab-size {unfit}"):
            padded_vocab_size(257, args)


@pytest.fixture(scope="module")
def bpe_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """GPT-2 style byte-level BPE trained on this file: vocab.json, merges.txt, tokenizer.json."""
    from tokenizers import ByteLevelBPETokenizer

    folder = tmp_path_factory.mktemp("bpe")
    trained = ByteLevelBPETokenizer()
    trained.train([__file__], vocab_size=400, special_tokens=["<|endoftext|>", "<pad>"])
    trained.save_model(str(folder))
    trained.save(str(folder / "tokenizer.json"))
    return folder


def test_gpt2_bpe_agrees_with_the_trained_tokenizer(bpe_folder: Path) -> None:
    from tokenizers import Tokenizer

    args = flags(
        "GPT2BPETokenizer",
        vocab_file=str(bpe_folder / "vocab.json"),
        merge_file=str(bpe_folder / "merges.txt"),
    )
    tokenizer = build_tokenizer(args)
    truth = Tokenizer.from_file(str(bpe_folder / "tokenizer.json"))
    assert tokenizer.tokenize(TEXT) == truth.encode(TEXT).ids
    assert tokenizer.detokenize(tokenizer.tokenize(TEXT)) == TEXT
    assert tokenizer.eod == truth.token_to_id("<|endoftext|>")
    assert tokenizer.vocab_size == 400
    assert tokenizer.tokenize("a<|endoftext|>")[-1] == tokenizer.eod


def test_hugging_face_file_and_folder_agree(bpe_folder: Path) -> None:
    folder = build_tokenizer(flags("HuggingFaceTokenizer", tokenizer_model=str(bpe_folder)))
    file = build_tokenizer(
        flags("HuggingFaceTokenizer", tokenizer_model=str(bpe_folder / "tokenizer.json"))
    )
    assert folder.tokenize(TEXT) == file.tokenize(TEXT)
    assert folder.detokenize(folder.tokenize(TEXT)) == TEXT
    assert folder.vocab_size == file.vocab_size == 400
    with pytest.raises(AttributeError):
        _ = file.pad


def test_hugging_face_config_beside_names_eod_and_pad(bpe_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes((bpe_folder / "tokenizer.json").read_bytes())
    config = {"eos_token": {"content": "e"}, "pad_token": "<pad>", "bos_token": None}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = build_tokenizer(flags("HuggingFaceTokenizer", tokenizer_model=str(tmp_path)))
    assert [tokenizer.eod] == tokenizer.tokenize("e")
    assert tokenizer.pad == 1


@pytest.fixture(scope="module")
def sentencepiece_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    from sentencepiece import SentencePieceTrainer

    prefix = tmp_path_factory.mktemp("sentencepiece") / "model"
    SentencePieceTrainer.train(
        input=__file__, model_prefix=str(prefix), vocab_size=400, byte_fallback=True,
        minloglevel=2, hard_vocab_limit=False,
    )  # fmt: skip
    return f"{prefix}.model"


@pytest.mark.parametrize("kind", ["GPTSentencePieceTokenizer", "Llama2Tokenizer"])
def test_sentencepiece_ids_are_the_librarys(sentencepiece_model: str, kind: str) -> None:
    from sentencepiece import SentencePieceProcessor

    tokenizer = build_tokenizer(flags(kind, tokenizer_model=sentencepiece_model))
    truth = SentencePieceProcessor(model_file=sentencepiece_model)
    assert tokenizer.tokenize("Call me Ishmael.") == truth.encode("Call me Ishmael.")
    assert tokenizer.detokenize(tokenizer.tokenize("Call me Ishmael.")) == "Call me Ishmael."
    assert tokenizer.eod == truth.eos_id()
    assert tokenizer.vocab_size == truth.get_piece_size()


def test_sentencepiece_tokenizer_reserves_special_ids(sentencepiece_model: str) -> None:
    """Megatron-LM adds <CLS> <SEP> <EOD> <MASK> and, as this model has no padding, <PAD>."""
    plain = build_tokenizer(flags("Llama2Tokenizer", tokenizer_model=sentencepiece_model))
    reserving = flags("SentencePieceTokenizer", tokenizer_model=sentencepiece_model)
    assert build_tokenizer(reserving).vocab_size == plain.vocab_size + 5


def test_unique_identifiers_tell_tokenizers_apart_and_are_json() -> None:
    one, same, other = (
        build_tokenizer(flags("NullTokenizer", vocab_size=size)).unique_identifiers
        for size in (256, 256, 300)
    )
    assert one == same != other
    assert json.loads(json.dumps(one)) == dict(one)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (flags("NullTokenizer"), "needs --vocab-size N"),
        (flags("GPT2BPETokenizer"), "needs --vocab-file PATH"),
        (flags("GPT2BPETokenizer", vocab_file=__file__), "needs --merge-file PATH"),
        (flags("GPT2BPETokenizer", vocab_file=__file__, merge_file=__file__), "--vocab-file"),
        (flags("GPT2BPETokenizer", vocab_file="/no/such"), "--vocab-file /no/such: no such file"),
        (flags("HuggingFaceTokenizer"), "needs --tokenizer-model PATH"),
        (flags("HuggingFaceTokenizer", tokenizer_model=__file__), "is no tokenizer.json"),
        (flags("Llama2Tokenizer"), "needs --tokenizer-model PATH"),
        (flags("Llama2Tokenizer", tokenizer_model=__file__), "is no SentencePiece model"),
        (flags("TikTokenizer"), "not supported here; choose from ByteTokenizer"),
        (flags("Wordy"), "--tokenizer-type Wordy is unknown"),
    ],
)
def test_build_tokenizer_unfit_flags_are_named(args: Namespace, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        build_tokenizer(args)


def test_hugging_face_without_end_of_text_says_what_to_add(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models

    Tokenizer(models.WordLevel({"a": 0}, unk_token="a")).save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(UsageError, match=r'tokenizer_config\.json with "eos_token"'):
        build_tokenizer(flags("HuggingFaceTokenizer", tokenizer_model=str(tmp_path)))


def test_legacy_tokenizer_differs_where_megatron_lm_does(
    bpe_folder: Path, sentencepiece_model: str
) -> None:
    """The characters of an end-of-text token are then text; Llama2Tokenizer begins with BOS."""
    gpt2 = flags(
        "GPT2BPETokenizer",
        vocab_file=str(bpe_folder / "vocab.json"),
        merge_file=str(bpe_folder / "merges.txt"),
        legacy_tokenizer=True,
    )
    assert build_tokenizer(gpt2).eod not in build_tokenizer(gpt2).tokenize("<|endoftext|>")
    llama = flags("Llama2Tokenizer", tokenizer_model=sentencepiece_model)
    plain = build_tokenizer(llama).tokenize("Call me")
    llama.legacy_tokenizer = True
    assert build_tokenizer(llama).tokenize("Call me") == [1, *plain]
    llama.tokenizer_type = "SentencePieceTokenizer"
    with pytest.raises(UsageError, match="leave out"):
        build_tokenizer(llama)
