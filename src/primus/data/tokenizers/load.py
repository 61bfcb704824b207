"""Load a tokenizer from a path, a folder, a name on the Hub, or the content of its file."""

from __future__ import annotations

from pathlib import Path

from primus.data.tokenizers import huggingface, locate, sentencepiece
from primus.data.tokenizers.content import is_json, pause_garbage_collection
from primus.data.tokenizers.document_ends import EndChoice
from primus.data.tokenizers.tokenizer import Tokenizer
from primus.errors import UsageError

SENTENCEPIECE_TYPES = ("SentencePieceTokenizer", "GPTSentencePieceTokenizer")
"""Tokenizer types of Megatron that are always SentencePiece models."""
EITHER_TYPE = "Llama2Tokenizer"
"""Tokenizer type that is a SentencePiece model in Megatron and a Hugging Face tokenizer in Primus."""


def load_tokenizer(
    name: str | Path,
    eod: str | None = None,
    parse_special_tokens: bool = False,
    fast: bool = True,
    follow_declared: bool = False,
) -> Tokenizer:
    """Load the tokenizer at a path or with a name.

    Args:
        name: A tokenizer.json, a SentencePiece .model, a .tiktoken file, a folder with one of them or with vocab.json
            and merges.txt, ``VOCAB.json,MERGES.txt``, a name on the hub such as ``Qwen/Qwen3-8B``,
            ``tiktoken:cl100k_base``, or ``tiktoken:SCHEME:FILE``.
        eod: End-of-document token. None: the first token of `END_OF_DOCUMENT` in the vocabulary, or else the token that
            the files next to the tokenizer declare.
        parse_special_tokens: Whether special tokens in a text become their ids instead of plain text. A text can then
            forge the end of a document.
        fast: Whether to use the fast path if it supports the tokenizer.
        follow_declared: Whether the token that the files declare takes precedence, as in Megatron-LM.

    Raises:
        UsageError: The tokenizer does not exist or is damaged, or it has no token `eod`.
        PrimusError: The hub cannot be reached.
    """
    content = locate.read_tokenizer(str(name))
    end = EndChoice(eod, locate.find_declared_end(str(name), ask_hub=follow_declared), follow_declared)
    return _load_content(content, str(name), end, parse_special_tokens, fast)


def parse_tokenizer(
    content: bytes, name: str, eod: str | None = None, parse_special_tokens: bool = False, fast: bool = True
) -> Tokenizer:
    """Load a tokenizer from the content of its file; see `load_tokenizer`."""
    return _load_content(content, name, EndChoice(eod), parse_special_tokens, fast)


def _load_content(content: bytes, name: str, end: EndChoice, parse_special_tokens: bool, fast: bool) -> Tokenizer:
    with pause_garbage_collection():
        if is_json(content):
            return huggingface.build_tokenizer(content, name, end, parse_special_tokens, fast)
        return sentencepiece.build_tokenizer(content, name, end, parse_special_tokens, fast)


def check_tokenizer_type(tokenizer: Tokenizer, tokenizer_type: str) -> Tokenizer:
    """Return the tokenizer if it matches the setting `data.tokenizer_type`.

    Raises:
        UsageError: The tokenizer is of another type.
    """
    is_model = tokenizer.file_suffix == ".model"
    if tokenizer_type != EITHER_TYPE and is_model != (tokenizer_type in SENTENCEPIECE_TYPES):
        right = SENTENCEPIECE_TYPES[0] if is_model else "HuggingFaceTokenizer"
        raise UsageError(f"{tokenizer.name} is not a {tokenizer_type}", f"set tokenizer_type to {right}")
    return tokenizer
