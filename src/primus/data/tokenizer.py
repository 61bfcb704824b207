"""The contract of tokenizers, and the door to all kinds of them: by a path, a folder, a name, or their content."""

from __future__ import annotations

import gc
import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import msgspec
import numpy as np
from numpy.typing import NDArray

from primus.data.tokenizers.declared import DeclaredEnd, EndChoice
from primus.errors import UsageError, did_you_mean

END_OF_TEXT = "<|endoftext|>"
END_OF_DOCUMENT = (
    END_OF_TEXT,  # GPT-2, Qwen, Phi, gpt-oss
    "<|end_of_text|>",  # Llama 3
    "<\uff5cend\u2581of\u2581sentence\uff5c>",  # DeepSeek
    "</s>",  # Llama 2, Mistral, Mixtral
    "<eos>",  # Gemma
    "<|eos|>",
    "[EOS]",
    "[SEP]",
)
"""Tokens that end a document, in the order in which they are looked for (tokenizer_config.json of these models)."""

BEGIN_OF_DOCUMENT = (
    "<|begin_of_text|>",  # Llama 3
    "<\uff5cbegin\u2581of\u2581sentence\uff5c>",  # DeepSeek
    "<s>",  # Llama 2, Mistral, Mixtral
    "<bos>",  # Gemma
    "<|startoftext|>",  # gpt-oss
    "[BOS]",
    "[CLS]",
)
"""Tokens that begin a document, in the order in which they are looked for."""

SENTENCEPIECE_TYPES = ("SentencePieceTokenizer", "GPTSentencePieceTokenizer")
"""Megatron's names of tokenizers that can only be SentencePiece models."""
EITHER_TYPE = "Llama2Tokenizer"
"""A SentencePiece model to Megatron, and a Hugging Face tokenizer to Primus."""

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
        from primus.data.tokenizers.cuts import cut_text

        return cut_text(text, size) if self.cuttable else [text]


def load(
    name: str | Path,
    eod: str | None = None,
    parse_special_tokens: bool = False,
    fast: bool = True,
    in_parallel: bool = False,
    follow_declared: bool = False,
) -> Tokenizer:
    """The tokenizer at a path or of a name.

    Args:
        name: A tokenizer.json, a SentencePiece .model, a .tiktoken file, a folder with one of them or with vocab.json
            and merges.txt, ``VOCAB.json,MERGES.txt``, a name on the hub such as ``Qwen/Qwen3-8B``,
            ``tiktoken:cl100k_base``, or ``tiktoken:SCHEME:FILE``.
        eod: Token that ends a document; when None, one of `END_OF_DOCUMENT` that the vocabulary has, else the one that
            the files beside the tokenizer declare.
        parse_special_tokens: Whether a special token that a text spells out becomes its id, which lets a text forge the
            end of a document, instead of plain text.
        fast: Whether to encode the fast way where it knows the tokenizer.
        in_parallel: Whether the library that defines the ids may load in a process of its own, which is forked from
            this one and answers for it, while the fast way loads here.
        follow_declared: Whether what the files beside the tokenizer declare comes first, as in Megatron-LM.

    Raises:
        UsageError: There is no such tokenizer, it is damaged, or it has no token `eod`.
        PrimusError: The hub cannot be reached.
    """
    from primus.data.tokenizers import locate

    content = locate.read_tokenizer(str(name))
    end = EndChoice(eod, locate.find_declared_end(str(name), ask_hub=follow_declared), follow_declared)
    return _load_content(content, str(name), end, parse_special_tokens, fast, in_parallel)


def from_content(
    content: bytes,
    name: str,
    eod: str | None = None,
    parse_special_tokens: bool = False,
    fast: bool = True,
    in_parallel: bool = False,
) -> Tokenizer:
    """The tokenizer that a file's content describes; see `load`."""
    return _load_content(content, name, EndChoice(eod), parse_special_tokens, fast, in_parallel)


def _load_content(
    content: bytes, name: str, end: EndChoice, parse_special_tokens: bool, fast: bool, in_parallel: bool
) -> Tokenizer:
    from primus.data.tokenizers import huggingface, sentencepiece

    with _without_collector():
        if is_json(content):
            return huggingface.from_content(content, name, end, parse_special_tokens, fast, in_parallel)
        return sentencepiece.from_content(content, name, end, parse_special_tokens, fast)


@contextmanager
def _without_collector() -> Iterator[None]:
    """No search for garbage meanwhile: among the millions of objects of a vocabulary it finds none, and takes long."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def check_type(tokenizer: Tokenizer, tokenizer_type: str) -> Tokenizer:
    """The tokenizer, if it is of the kind that `data.tokenizer_type` says.

    Raises:
        UsageError: It is of another kind.
    """
    is_model = tokenizer.file_suffix == ".model"
    if tokenizer_type != EITHER_TYPE and is_model != (tokenizer_type in SENTENCEPIECE_TYPES):
        right = SENTENCEPIECE_TYPES[0] if is_model else "HuggingFaceTokenizer"
        raise UsageError(f"{tokenizer.name} is no {tokenizer_type}", f"set tokenizer_type to {right}")
    return tokenizer


def is_json(content: bytes) -> bool:
    """Whether a tokenizer's content is a tokenizer.json, and not a SentencePiece model."""
    return content[:64].lstrip()[:1] == b"{"


def fingerprint_content(content: bytes) -> str:
    """Identity of a tokenizer: sha256 of what decides the ids of a text.

    Two tokenizer.json that differ only in layout, decoding, padding or templates, as when a library saves one again,
    are equal. Of a SentencePiece model it is the sha256 of the file.
    """
    if not is_json(content):
        return hashlib.sha256(content).hexdigest()
    with _without_collector():
        return fingerprint_described(msgspec.json.decode(content))


def fingerprint_described(described: dict[str, Any]) -> str:
    """`fingerprint` of a parsed tokenizer.json."""
    model = described.get("model", {})
    vocabulary = model.get("vocab")
    if isinstance(vocabulary, dict):  # that of a unigram model is a list already
        vocabulary = sorted(vocabulary.items(), key=itemgetter(1, 0))
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model.get("merges", [])]
    parts = [
        *(described.get(key) for key in ("normalizer", "pre_tokenizer")),
        sorted(
            (token["id"], token["content"], bool(token.get("special"))) for token in described.get("added_tokens", [])
        ),
        *(model.get("type", "BPE"), bool(model.get("ignore_merges")), bool(model.get("byte_fallback"))),
        *(vocabulary, merges),
    ]
    return hashlib.sha256(msgspec.json.encode(parts, order="deterministic")).hexdigest()


def find_end_of_document(vocabulary: dict[str, int], end: EndChoice, name: str) -> str | None:
    """The token that ends a document: the one asked for, a known one that the vocabulary has, or the declared one.

    Raises:
        UsageError: The vocabulary has no token that was asked for.
    """
    if end.asked is None:
        declared = end.declared.find_token(vocabulary) if end.declared else None
        known = next((token for token in END_OF_DOCUMENT if token in vocabulary), None)
        return (declared or known) if end.follow else (known or declared)
    if end.asked not in vocabulary:
        special = [token for token in vocabulary if token.startswith(("<", "["))]
        raise UsageError(f"{name}: no token '{end.asked}' in this tokenizer", did_you_mean(end.asked, special[:200]))
    return end.asked


def find_begin_of_document(vocabulary: dict[str, int]) -> int | None:
    """Id of the first known token that begins a document and that the vocabulary has."""
    return next((vocabulary[token] for token in BEGIN_OF_DOCUMENT if token in vocabulary), None)
