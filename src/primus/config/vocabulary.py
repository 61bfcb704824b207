"""Size of a tokenizer's vocabulary, read from its files without any tokenizer library."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec
from msgspec import Struct

from primus.protobuf import read_fields

_PIECES = 1
"""Field of the pieces in a SentencePiece model (sentencepiece_model.proto)."""


PUBLISHED_SIZES = {
    "gpt2": 50257,
    "gpt2-medium": 50257,
    "gpt2-large": 50257,
    "gpt2-xl": 50257,
    "gpt-neox-20b": 50432,
    "bloom": 250880,
    "falcon-7b": 65024,
    "mistral-7b-v0.1": 32000,
    "mistral-7b-v0.3": 32768,
    "mistral-nemo-2407": 131072,
    "qwen1.5-0.5b": 151936,
    "qwen1.5-1.8b": 151936,
    "qwen1.5-4b": 151936,
    "qwen1.5-7b": 151936,
    "qwen1.5-14b": 152064,
    "qwen1.5-72b": 152064,
    "starcoder": 49152,
    "gemma-7b": 256000,
}
"""`vocab_size` in the config.json of models on the Hugging Face Hub of which there is no preset, by name."""


class _AddedToken(Struct):
    id: int


class _Model(Struct):
    vocab: dict[str, int] | list[object] = {}
    """Ids by token, or the tokens of a Unigram model in the order of their ids."""


class _TokenizerFile(Struct):
    """The part of a tokenizer.json that gives ids."""

    model: _Model
    added_tokens: list[_AddedToken] = []


class _DataTokenizer(Struct):
    name: str
    vocab_size: int


class _DataManifest(Struct):
    """The part of the manifest of a token file that its tokenizer is in."""

    tokenizer: _DataTokenizer


def find_tokenizer_size(name: str) -> int | None:
    """Largest token id + 1 of a local tokenizer.json or SentencePiece model, given by its file or folder.

    None for a name on a hub, and for an unreadable file, which loading it reports.
    """
    path = Path(os.path.expanduser(name))
    try:
        if path.is_dir():
            found = path / "tokenizer.json"
            path = found if found.is_file() else next(iter(path.glob("*.model")), found)
        if path.suffix == ".json":
            return _read_json_size(path.read_bytes())
        return _count_pieces(path.read_bytes()) or None if path.suffix == ".model" else None
    except (OSError, ValueError, IndexError, msgspec.MsgspecError):
        return None


def find_vocabulary_size(file: str) -> int | None:
    """Largest token id + 1 of a vocab.json of GPT-2's kind; None if it cannot be read."""
    try:
        ids = msgspec.json.decode(Path(os.path.expanduser(file)).read_bytes(), type=dict[str, int])
    except (OSError, msgspec.MsgspecError):
        return None
    return max(ids.values(), default=-1) + 1 or None


def find_data_tokenizer(prefix: Path) -> tuple[str, int] | None:
    """Name and size of the tokenizer that token files were made with; None if no manifest states it."""
    try:
        content = prefix.with_name(f"{prefix.name}.manifest.json").read_bytes()
        tokenizer = msgspec.json.decode(content, type=_DataManifest).tokenizer
    except (OSError, msgspec.MsgspecError):
        return None
    return tokenizer.name, tokenizer.vocab_size


def _read_json_size(content: bytes) -> int | None:
    file = msgspec.json.decode(content, type=_TokenizerFile)
    vocab = file.model.vocab
    ids = vocab.values() if isinstance(vocab, dict) else range(len(vocab))
    return max((max(ids, default=-1), *(token.id for token in file.added_tokens))) + 1 or None


def _count_pieces(content: bytes) -> int:
    return sum(number == _PIECES and isinstance(value, bytes) for number, value in read_fields(content))
