"""Tokenizers of the Hugging Face `tokenizers` library, described by a tokenizer.json."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import msgspec
import numpy as np

from primus.data.tokenizer import Batch, Tokenizer, begin_of_document, end_of_document, identity
from primus.data.tokenizers.cuts import is_cuttable
from primus.data.tokenizers.fast import of_json
from primus.errors import PrimusError, UsageError


class Library:
    """The `tokenizers` library as an engine.

    It can be pickled: the other process loads its own from the content, when it needs it.
    """

    def __init__(self, content: bytes, name: str, parse_special_tokens: bool) -> None:
        """An engine of a tokenizer.json."""
        self.content = content
        self.name = name
        self.parse_special_tokens = parse_special_tokens

    def __reduce__(self) -> tuple[Any, ...]:
        return Library, (self.content, self.name, self.parse_special_tokens)

    @cached_property
    def backend(self) -> Any:
        """The ``tokenizers.Tokenizer``, without truncation and padding."""
        backend = _parse(self.content, self.name)
        backend.no_truncation()
        backend.no_padding()
        backend.encode_special_tokens = not self.parse_special_tokens
        return backend

    def encode_batch(self, texts: Sequence[str], add_special_tokens: bool) -> Batch:
        """Token ids of each text."""
        try:
            encodings = self.backend.encode_batch_fast(texts, add_special_tokens=add_special_tokens)
        except TypeError as error:
            raise lone_surrogate(texts, error) from None
        lengths = np.fromiter((len(encoding) for encoding in encodings), np.int64, len(encodings))
        tokens = np.empty(int(lengths.sum()), np.uint32)
        start = 0
        for encoding, length in zip(encodings, lengths.tolist(), strict=True):
            tokens[start : start + length] = encoding.ids
            start += length
        return tokens, lengths

    def decode(self, ids: Sequence[int]) -> str:
        """Text of token ids, special tokens included."""
        text: str = self.backend.decode(ids, skip_special_tokens=False)
        return text


def from_content(content: bytes, name: str, eod: str | None, parse_special_tokens: bool, fast: bool) -> Tokenizer:
    """The tokenizer that a tokenizer.json describes; see `primus.data.tokenizer.load`.

    Raises:
        UsageError: It is damaged, has no token `eod`, or the library would number its tokens differently.
    """
    exact = Library(content, name, parse_special_tokens)
    vocabulary: dict[str, int] = exact.backend.get_vocab(with_added_tokens=True)
    described = msgspec.json.decode(content)
    added = described.get("added_tokens", [])
    _check_numbers(added, vocabulary, name)
    token = end_of_document(vocabulary, eod, name)
    return Tokenizer(
        name=name,
        content=content,
        file_suffix=".json",
        vocab_size=max(vocabulary.values()) + 1,
        eod=token,
        eod_id=None if token is None else vocabulary[token],
        bos_id=begin_of_document(vocabulary),
        fingerprint=identity(described),
        special_strings=tuple(token["content"] for token in added if token.get("special")),
        parse_special_tokens=parse_special_tokens,
        cuttable=is_cuttable(described),
        exact=exact,
        fast=of_json(exact, content, described, parse_special_tokens) if fast else None,
    )


def lone_surrogate(texts: Sequence[str], error: Exception) -> Exception:
    """What is to be raised where a library gave `error` for texts, one of which may be no Unicode."""
    for number, text in enumerate(texts):
        try:
            text.encode()
        except UnicodeEncodeError as wrong:
            return PrimusError(
                f"text {number} of a batch has the lone surrogate U+{ord(text[wrong.start]):04X} "
                f"at character {wrong.start}",
                "replace such characters when the text is read",
            )
    return error


def _parse(content: bytes, name: str) -> Any:
    from tokenizers import Tokenizer as Backend

    try:
        return Backend.from_str(content.decode())
    except Exception as error:  # noqa: BLE001 - the library raises bare Exception for every kind of damage
        raise UsageError(f"{name}: not a tokenizer.json ({error})", "save or download it again") from None


def _check_numbers(added: list[dict[str, Any]], vocabulary: dict[str, int], name: str) -> None:
    """The library numbers added tokens anew that the model's vocabulary does not have, where its ids have gaps."""
    for token in added:
        if vocabulary.get(token["content"]) != token["id"]:
            raise UsageError(
                f"{name}: the library gives {token['content']} the id {vocabulary.get(token['content'])}, "
                f"but the file says {token['id']}",
                "add the token to model.vocab in the file, so that its id stays",
            )
