"""SentencePiece models."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from primus.data.tokenizer import Batch, Tokenizer, end_of_document, fingerprint
from primus.errors import UsageError


class Library:
    """The `sentencepiece` library as an engine."""

    def __init__(self, processor: Any, before: Sequence[int]) -> None:
        """An engine of a ``SentencePieceProcessor`` whose template puts the ids `before` in front of a text."""
        self.processor = processor
        self.before = list(before)

    def encode_batch(self, texts: Sequence[str], add_special_tokens: bool) -> Batch:
        """Token ids of each text."""
        before = self.before if add_special_tokens else []
        rows = [before + self.processor.encode(text) for text in texts]
        lengths = np.fromiter(map(len, rows), np.int64, len(rows))
        tokens = np.empty(int(lengths.sum()), np.uint32)
        start = 0
        for row in rows:
            tokens[start : start + len(row)] = row
            start += len(row)
        return tokens, lengths

    def decode(self, ids: Sequence[int]) -> str:
        """Text of token ids, special tokens included."""
        text: str = self.processor.decode([int(token) for token in ids])
        return text


def from_content(content: bytes, name: str, eod: str | None, parse_special_tokens: bool, fast: bool) -> Tokenizer:
    """The tokenizer of a SentencePiece model; see `primus.data.tokenizer.load`.

    Raises:
        UsageError: It is damaged, has no token `eod`, or special tokens in the text are to be parsed, which the library
            does not do.
    """
    processor = _parse(content, name)
    if parse_special_tokens:
        raise UsageError(
            f"{name}: SentencePiece takes special tokens in a text for plain text", "leave that option out"
        )
    vocabulary = {processor.id_to_piece(number): number for number in range(processor.get_piece_size())}
    if eod is None and processor.eos_id() >= 0:
        eod = processor.id_to_piece(processor.eos_id())
    token = end_of_document(vocabulary, eod, name)
    bos = processor.bos_id() if processor.bos_id() >= 0 else None
    return Tokenizer(
        name=name,
        content=content,
        file_suffix=".model",
        vocab_size=processor.get_piece_size(),
        eod=token,
        eod_id=None if token is None else vocabulary[token],
        bos_id=bos,
        fingerprint=fingerprint(content),
        special_strings=tuple(piece for piece, number in vocabulary.items() if processor.is_control(number)),
        parse_special_tokens=False,
        exact=Library(processor, [] if bos is None else [bos]),
        fast=None,
    )


def _parse(content: bytes, name: str) -> Any:
    try:
        import sentencepiece
    except ImportError:
        raise UsageError(
            f"{name}: SentencePiece models need the package sentencepiece", "pip install sentencepiece"
        ) from None
    processor = sentencepiece.SentencePieceProcessor()
    try:
        loaded = processor.LoadFromSerializedProto(content)
    except (RuntimeError, TypeError) as error:
        raise UsageError(f"{name}: not a SentencePiece model ({error})", "save or download it again") from None
    if not loaded or not processor.get_piece_size():
        raise UsageError(f"{name}: not a SentencePiece model", "save or download it again")
    return processor
