"""Tokenizers of SentencePiece models."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import numpy as np

from primus.data.tokenizers.content import fingerprint_content
from primus.data.tokenizers.document_ends import EndChoice, find_end_of_document
from primus.data.tokenizers.fast import build_for_sentencepiece
from primus.data.tokenizers.huggingface import find_lone_surrogate
from primus.data.tokenizers.tokenizer import Batch, Tokenizer
from primus.errors import UsageError
from primus.protobuf import read_fields

_PIECES, _TYPE, _USER_DEFINED = 1, 3, 4
"""Numbers in sentencepiece_model.proto."""


class SentencePieceEngine:
    """Engine of the `sentencepiece` library.

    It can be pickled: the receiving process loads the model from the content on first use.
    """

    def __init__(self, content: bytes, name: str) -> None:
        """Create an engine from the content of a model."""
        self.content = content
        self.name = name

    def __reduce__(self) -> tuple[Any, ...]:
        return SentencePieceEngine, (self.content, self.name)

    @cached_property
    def processor(self) -> Any:
        """The ``SentencePieceProcessor``."""
        return _parse_model(self.content, self.name)

    def encode_batch(self, texts: Sequence[str], add_special_tokens: bool) -> Batch:
        """Token ids of each text."""
        bos = self.processor.bos_id()
        before = [bos] if add_special_tokens and bos >= 0 else []
        try:
            rows = [before + self.processor.encode(text) for text in texts]
        except (RuntimeError, UnicodeEncodeError) as error:
            raise find_lone_surrogate(texts, error) from None
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


def build_tokenizer(content: bytes, name: str, end: EndChoice, parse_special_tokens: bool, fast: bool) -> Tokenizer:
    """Build the tokenizer of a SentencePiece model; see `primus.data.tokenizers.load.load_tokenizer`.

    Raises:
        UsageError: The model is damaged or does not have the end-of-document token, or `parse_special_tokens` is set,
            which the library does not support.
    """
    exact = SentencePieceEngine(content, name)
    processor = exact.processor
    if parse_special_tokens:
        raise UsageError(
            f"{name}: SentencePiece treats special tokens in a text as plain text", "leave that option out"
        )
    vocabulary = {processor.id_to_piece(number): number for number in range(processor.get_piece_size())}
    declared = end.declared.find_token(vocabulary) if end.declared else None
    if end.asked is None and processor.eos_id() >= 0 and not (end.follow and declared):
        end = replace(end, asked=processor.id_to_piece(processor.eos_id()))
    token = find_end_of_document(vocabulary, end, name)
    control = tuple(piece for piece, number in vocabulary.items() if processor.is_control(number))
    return Tokenizer(
        name=name,
        content=content,
        file_suffix=".model",
        vocab_size=processor.get_piece_size(),
        eod=token,
        eod_id=None if token is None else vocabulary[token],
        declared_end=end.declared,
        declared_eod=declared,
        bos_id=processor.bos_id() if processor.bos_id() >= 0 else None,
        fingerprint=fingerprint_content(content),
        special_strings=control,
        parse_special_tokens=False,
        cuttable=False,
        exact=exact,
        fast=None if not fast or _has_user_defined(content) else build_for_sentencepiece(exact, content, control),
    )


def _parse_model(content: bytes, name: str) -> Any:
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


def _has_user_defined(content: bytes) -> bool:
    """Whether a model has user-defined pieces, which are never split and change how the text around them is encoded.

    sentencepiece_model.proto: field 1 of ModelProto is a piece, field 3 of a piece is its type.
    """
    pieces = (value for number, value in read_fields(content) if number == _PIECES and isinstance(value, bytes))
    return any(field == (_TYPE, _USER_DEFINED) for piece in pieces for field in read_fields(piece))
