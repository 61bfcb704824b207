"""Tokenizers of the Hugging Face `tokenizers` library, which a tokenizer.json defines."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import msgspec
import numpy as np

from primus.data.tokenizers.document_ends import EndChoice, find_begin_of_document, find_end_of_document
from primus.data.tokenizers.fast import build_for_json
from primus.data.tokenizers.tokenizer import Batch, Tokenizer
from primus.data.tokenizers.tokenizer_json import AddedToken, TokenizerJson
from primus.errors import PrimusError, UsageError


@dataclass(frozen=True)
class VocabularyFacts:
    """Fields of `Tokenizer` that come from the vocabulary."""

    vocab_size: int
    eod: str | None
    eod_id: int | None
    declared_eod: str | None
    bos_id: int | None
    fingerprint: str


class HuggingFaceEngine:
    """Engine of the `tokenizers` library.

    It can be pickled: the receiving process loads the library's tokenizer from the content on first use.
    """

    def __init__(self, content: bytes, name: str, parse_special_tokens: bool) -> None:
        """Create an engine from the content of a tokenizer.json."""
        self.content = content
        self.name = name
        self.parse_special_tokens = parse_special_tokens

    def __reduce__(self) -> tuple[Any, ...]:
        return HuggingFaceEngine, (self.content, self.name, self.parse_special_tokens)

    @cached_property
    def library_tokenizer(self) -> Any:
        """The ``tokenizers.Tokenizer``, without truncation and padding."""
        return self._configure_backend(self.content)

    def load(self, end: EndChoice) -> VocabularyFacts:
        """Create the backend, and return the facts of its vocabulary.

        Raises:
            UsageError: The file is damaged, does not have the end-of-document token, or the library assigns other ids.
        """
        described = TokenizerJson.decode(self.content).join_merges()
        self.library_tokenizer = self._configure_backend(described.encode())
        _check_numbers(described.added_tokens, self.library_tokenizer, self.name)
        vocabulary = described.collect_vocabulary()
        token = find_end_of_document(vocabulary, end, self.name)
        return VocabularyFacts(
            vocab_size=max(vocabulary.values()) + 1,
            eod=token,
            eod_id=None if token is None else vocabulary[token],
            declared_eod=end.declared.find_token(vocabulary) if end.declared else None,
            bos_id=find_begin_of_document(vocabulary),
            fingerprint=described.compute_fingerprint(),
        )

    def _configure_backend(self, content: bytes) -> Any:
        backend = _parse_json(content, self.name)
        backend.no_truncation()
        backend.no_padding()
        backend.encode_special_tokens = not self.parse_special_tokens
        return backend

    def encode_batch(self, texts: Sequence[str], add_special_tokens: bool) -> Batch:
        """Token ids of each text."""
        try:
            encodings = self.library_tokenizer.encode_batch_fast(texts, add_special_tokens=add_special_tokens)
        except TypeError as error:
            raise find_lone_surrogate(texts, error) from None
        lengths = np.fromiter((len(encoding) for encoding in encodings), np.int64, len(encodings))
        tokens = np.empty(int(lengths.sum()), np.uint32)
        start = 0
        for encoding, length in zip(encodings, lengths.tolist(), strict=True):
            tokens[start : start + length] = encoding.ids
            start += length
        return tokens, lengths

    def decode(self, ids: Sequence[int]) -> str:
        """Text of token ids, special tokens included."""
        text: str = self.library_tokenizer.decode(ids, skip_special_tokens=False)
        return text


def build_tokenizer(content: bytes, name: str, end: EndChoice, parse_special_tokens: bool, fast: bool) -> Tokenizer:
    """Build the tokenizer of a tokenizer.json; see `primus.data.tokenizers.load.load_tokenizer`.

    Raises:
        UsageError: The file is damaged, does not have the end-of-document token, or the library assigns other ids.
    """
    library = HuggingFaceEngine(content, name, parse_special_tokens)
    try:
        outline = TokenizerJson.decode_outline(content)
    except msgspec.MsgspecError as error:
        raise _build_damage_error(name, error) from None
    facts = library.load(end)
    return Tokenizer(
        name=name,
        content=content,
        file_suffix=".json",
        vocab_size=facts.vocab_size,
        eod=facts.eod,
        eod_id=facts.eod_id,
        declared_end=end.declared,
        declared_eod=facts.declared_eod,
        bos_id=facts.bos_id,
        fingerprint=facts.fingerprint,
        special_strings=tuple(token.content for token in outline.added_tokens if token.special),
        parse_special_tokens=parse_special_tokens,
        cuttable=outline.is_cuttable(),
        exact=library,
        fast=build_for_json(library, outline, parse_special_tokens) if fast else None,
    )


def find_lone_surrogate(texts: Sequence[str], error: Exception) -> Exception:
    """Error to raise after a library raised `error`: names the text with a lone surrogate, if there is one."""
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


def _parse_json(content: bytes, name: str) -> Any:
    from tokenizers import Tokenizer as Backend

    try:
        return Backend.from_str(content.decode())
    except Exception as error:  # noqa: BLE001 - the library raises bare Exception for every kind of damage
        raise _build_damage_error(name, error) from None


def _build_damage_error(name: str, error: Exception) -> UsageError:
    return UsageError(f"{name}: not a tokenizer.json ({error})", "save or download it again")


def _check_numbers(added: Sequence[AddedToken], backend: Any, name: str) -> None:
    """Check that the library keeps the ids of added tokens.

    It assigns new ids to added tokens that the model's vocabulary does not have if the ids have gaps.
    """
    for token in added:
        number = backend.token_to_id(token.content)
        if number != token.id:
            raise UsageError(
                f"{name}: the library gives {token.content} the id {number}, but the file says {token.id}",
                "add the token to model.vocab in the file, so that its id stays",
            )
