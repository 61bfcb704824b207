"""Token files and tokenizers for the tests of the data package."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest

from primus.data.megatron.indexed_dataset import IndexedWriter, choose_smallest_dtype
from primus.data.tokenizers.tokenizer import Tokenizer
from primus.data.tokenizers.trained import train_byte_level_bpe

WriteTokens = Callable[[str, Sequence[Sequence[int]]], Path]

WORDS = ("the", "quick", "brown", "fox", "jumps", "over", "lazy", "dogs", "while", "seven", "wizards", "make", "toxic")


def _prose(words: int, seed: int = 0) -> str:
    """Sentences of `words` words in all."""
    chosen = random.Random(seed).choices(WORDS, k=words)
    return " ".join(word + (".\n" if number % 11 == 10 else "") for number, word in enumerate(chosen))


@pytest.fixture(scope="session")
def prose() -> Callable[..., str]:
    """``prose(words, seed)`` makes sentences."""
    return _prose


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    """A byte-level BPE of 300 tokens."""
    return train_byte_level_bpe([_prose(2000)], 300)


@pytest.fixture(scope="session")
def tokenizer_file(tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same as a file."""
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    path.write_bytes(tokenizer.content)
    return path


@pytest.fixture
def write_tokens(tmp_path: Path) -> WriteTokens:
    """Write documents of token ids below 1000 and return their prefix."""

    def write(name: str, documents: Sequence[Sequence[int]]) -> Path:
        with IndexedWriter(tmp_path / name, choose_smallest_dtype(1000)) as writer:
            for document in documents:
                writer.add_document(np.array(document, dtype=np.int64))
            writer.commit()
        return tmp_path / name

    return write
