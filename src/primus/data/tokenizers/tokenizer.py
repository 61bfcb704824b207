"""The contract of tokenizers: what every kind of tokenizer offers to the code that encodes and decodes text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from primus.data.tokenizers.cuts import cut_text
from primus.data.tokenizers.document_ends import DeclaredEnd

Batch: TypeAlias = tuple[NDArray[np.uint32], NDArray[np.int64]]
"""[sum of lengths] token ids, one text after the other, and [n] tokens of each text."""


class TokenizerEngine(Protocol):
    """What turns texts into ids and back: a library, or the fast way beside it."""

    def encode_batch(self, texts: Sequence[str], add_special_tokens: bool) -> Batch:
        """Token ids of each text."""

    def decode(self, ids: Sequence[int]) -> str:
        """Text of token ids, special tokens included."""


class FastTokenizerEngine(TokenizerEngine, Protocol):
    """An engine beside the library, which encodes in its place where it fails."""

    failure: str
    """Why it failed, for the first time in this process; empty where it did not."""


@dataclass(frozen=True)
class Tokenizer:
    """A tokenizer with what the token files need to know about it.

    It can be pickled: the other process loads the libraries again, when it needs them.
    """

    name: str
    """What it was loaded from."""
    content: bytes
    """Its file: a tokenizer.json, or a SentencePiece model; tiktoken's files become a tokenizer.json."""
    file_suffix: str
    """End of the name of such a file, ``.json`` or ``.model``."""
    vocab_size: int
    """Largest token id + 1, which is more than the number of tokens where ids have gaps."""
    eod: str | None
    """Token that ends a document."""
    eod_id: int | None
    """Its id."""
    declared_end: DeclaredEnd | None
    """What the files beside the tokenizer say that ends a text; None where they say nothing, or were not asked."""
    declared_eod: str | None
    """That token, where the vocabulary has it."""
    bos_id: int | None
    """Id of the token that begins a document; None where there is none."""
    fingerprint: str
    """Identity of what decides the ids; see `fingerprint`."""
    special_strings: tuple[str, ...]
    """Tokens that a text must not be able to forge, the end of a document among them."""
    parse_special_tokens: bool
    """Whether a special token that a text spells out becomes its id instead of plain text."""
    cuttable: bool
    """Whether `safe_cuts` knows where this tokenizer always splits."""
    exact: TokenizerEngine
    """The library that defines the ids."""
    fast: FastTokenizerEngine | None
    """The same ids sooner, where this tokenizer is one that the fast way knows."""

    def encode(self, text: str) -> list[int]:
        """Token ids of a text, without special tokens."""
        ids: list[int] = self.exact.encode_batch([text], False)[0].tolist()
        return ids

    def encode_batch(self, texts: Sequence[str], add_special_tokens: bool = False) -> Batch:
        """Token ids of each text.

        Args:
            texts: The texts, without lone surrogates.
            add_special_tokens: Whether to add what the tokenizer's own template puts around a text.

        Raises:
            PrimusError: A text has a lone surrogate.
        """
        return (self.fast or self.exact).encode_batch(texts, add_special_tokens)

    def decode(self, ids: Sequence[int]) -> str:
        """Text of token ids, special tokens included."""
        return self.exact.decode(ids)

    def decode_valid(self, ids: Sequence[int]) -> str | None:
        """Text of token ids; None where one of them is outside the vocabulary."""
        return self.decode(ids) if all(0 <= token < self.vocab_size for token in ids) else None

    def safe_cuts(self, text: str, size: int) -> list[str]:
        """`text` in pieces of about `size` characters whose ids, one after the other, are the ids of the whole.

        A piece is longer where the tokenizer might not split, and for tokenizers whose way to split is not known the
        only piece is the whole. Holds without `add_special_tokens`.
        """
        return cut_text(text, size) if self.cuttable else [text]
