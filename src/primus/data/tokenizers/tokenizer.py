"""Interface of tokenizers, which all kinds of tokenizers implement."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from primus.data.tokenizers.cuts import cut_text
from primus.data.tokenizers.document_ends import DeclaredEnd

Batch: TypeAlias = tuple[NDArray[np.uint32], NDArray[np.int64]]
"""[sum of lengths] token ids of all texts, concatenated, and [n] number of tokens of each text."""


class TokenizerEngine(Protocol):
    """Converts texts to ids and back: the reference tokenizer or the fast path."""

    def encode_batch(self, texts: Sequence[str], add_special_tokens: bool) -> Batch:
        """Token ids of each text."""

    def decode(self, ids: Sequence[int]) -> str:
        """Text of token ids, special tokens included."""


class FastTokenizerEngine(TokenizerEngine, Protocol):
    """Fast path, which falls back to the reference tokenizer if it fails."""

    failure: str
    """Error of the first failure in this process; empty without a failure."""


@dataclass(frozen=True)
class Tokenizer:
    """A tokenizer and the facts about it that token files record.

    It can be pickled: the receiving process loads the engines again on first use.
    """

    name: str
    """Name or path that the tokenizer was loaded from."""
    content: bytes
    """Content of its file: a tokenizer.json (also for tiktoken's files), or a SentencePiece model."""
    file_suffix: str
    """Suffix of its file, ``.json`` or ``.model``."""
    vocab_size: int
    """Largest token id + 1, which is more than the number of tokens if the ids have gaps."""
    eod: str | None
    """Token that ends a document."""
    eod_id: int | None
    """Id of `eod`."""
    declared_end: DeclaredEnd | None
    """End-of-text token that the files next to the tokenizer declare; None if they declare none or were not read."""
    declared_eod: str | None
    """The token of `declared_end`, if the vocabulary has it."""
    bos_id: int | None
    """Id of the token that begins a document; None if the vocabulary has none."""
    fingerprint: str
    """Identity of everything that determines the ids; see `primus.data.tokenizers.content.fingerprint_content`."""
    special_strings: tuple[str, ...]
    """Tokens that a text must not be able to forge, including the end of a document."""
    parse_special_tokens: bool
    """Whether special tokens in a text become their ids instead of plain text."""
    cuttable: bool
    """Whether `cut_safely` can cut a text for this tokenizer."""
    exact: TokenizerEngine
    """The reference tokenizer: the library that defines the ids."""
    fast: FastTokenizerEngine | None
    """The fast path, which gives the same ids; None if it does not support this tokenizer or is disabled."""

    def encode(self, text: str) -> list[int]:
        """Token ids of a text, without special tokens."""
        ids: list[int] = self.exact.encode_batch([text], False)[0].tolist()
        return ids

    def encode_batch(self, texts: Sequence[str], add_special_tokens: bool = False) -> Batch:
        """Token ids of each text.

        Args:
            texts: The texts, without lone surrogates.
            add_special_tokens: Whether to add the special tokens of the tokenizer's template.

        Raises:
            PrimusError: A text has a lone surrogate.
        """
        return (self.fast or self.exact).encode_batch(texts, add_special_tokens)

    def decode(self, ids: Sequence[int]) -> str:
        """Text of token ids, special tokens included."""
        return self.exact.decode(ids)

    def decode_valid(self, ids: Sequence[int]) -> str | None:
        """Text of token ids; None if one of them is outside the vocabulary."""
        return self.decode(ids) if all(0 <= token < self.vocab_size for token in ids) else None

    def cut_safely(self, text: str, size: int) -> list[str]:
        """Cut `text` into pieces of about `size` characters whose concatenated ids are the ids of the whole text.

        A piece is longer if the tokenizer may not split at that point. A tokenizer that is not `cuttable` gets the
        whole text as one piece. The guarantee holds without `add_special_tokens`.
        """
        return cut_text(text, size) if self.cuttable else [text]
