"""Identity of a tokenizer: a digest of the parts of its file that determine the ids of a text."""

from __future__ import annotations

import gc
import hashlib
from collections.abc import Iterator
from contextlib import contextmanager

from primus.data.tokenizers.tokenizer_json import TokenizerJson


def is_json(content: bytes) -> bool:
    """Whether a tokenizer's content is a tokenizer.json, and not a SentencePiece model."""
    return content[:64].lstrip()[:1] == b"{"


def fingerprint_content(content: bytes) -> str:
    """Identity of a tokenizer: sha256 of everything that determines the ids of a text.

    Two tokenizer.json files that differ only in layout, decoding, padding or templates, for example because a library
    has saved one of them again, have the same fingerprint. The fingerprint of a SentencePiece model is the sha256 of
    the file.
    """
    if not is_json(content):
        return hashlib.sha256(content).hexdigest()
    with pause_garbage_collection():
        return TokenizerJson.decode(content).compute_fingerprint()


@contextmanager
def pause_garbage_collection() -> Iterator[None]:
    """Disable garbage collection within the block: parsing a vocabulary creates millions of objects and no cycles, and
    each collection would traverse all of them."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
