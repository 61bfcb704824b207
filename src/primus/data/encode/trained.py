"""A tokenizer trained on the text of a job, once for all processes that do the job."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from pathlib import Path

from primus.data import atomic
from primus.data.megatron.manifest import EncodeRecipe
from primus.data.readers import TextDocument
from primus.data.readers.shard import Shard
from primus.data.shards import inputs
from primus.data.shards.inputs import Inputs
from primus.data.tokenizers.document_ends import END_OF_TEXT
from primus.data.tokenizers.load import parse_tokenizer
from primus.data.tokenizers.tokenizer import Tokenizer
from primus.errors import UsageError

BPE = "bpe:"
"""What the name of a tokenizer that is to be trained begins with."""

TRAINING_CHARACTERS = 32_000_000
"""Text that a tokenizer is trained on at most; more costs memory and changes little."""

TRAINING_SHARDS = 64
"""Shards, evenly spread over the input, that the text is taken from at most."""


def is_trained(name: str) -> bool:
    """Whether a tokenizer's name asks for one to be trained."""
    return name.startswith(BPE)


def check(name: str, eod: str | None) -> None:
    """Make sure that the name of a tokenizer that is to be trained has a meaning.

    Raises:
        UsageError: It has none.
    """
    if not name.removeprefix(BPE).isdecimal():
        raise UsageError(f"tokenizer '{name}'", "give the number of tokens, like bpe:8192")
    if eod not in (None, END_OF_TEXT):
        raise UsageError(f"a trained tokenizer has {END_OF_TEXT}, not {eod}", "leave --eod out")


def train_tokenizer_once(
    name: str, text: Inputs, keys: Iterable[str], recipe: EncodeRecipe, folder: Path, fast: bool
) -> Tokenizer:
    """A byte-level BPE trained on the text, or the one in `folder` that somebody has trained on it.

    Args:
        name: ``bpe:VOCAB``.
        text: What to train on.
        keys: Fields of a record that hold text.
        recipe: Says how files become documents.
        folder: Where all processes of the job find it; nobody else trains in it meanwhile.
        fast: Whether to encode the fast way.
    """
    keys = tuple(keys)
    digest = hashlib.sha256(repr((name, text.identity, keys, recipe.text_documents)).encode()).hexdigest()
    path = folder / f"tokenizer-{digest[:16]}.json"
    if not path.is_file():
        from primus.data.tokenizers.trained import train_byte_level_bpe

        pieces = (piece for key in keys for piece in _sample_texts(text.shards, key, recipe.text_documents))
        trained = train_byte_level_bpe(pieces, int(name.removeprefix(BPE)))
        with atomic.stage_files({path: trained.content}) as publish:
            publish()
    return parse_tokenizer(path.read_bytes(), name, END_OF_TEXT, recipe.parse_special_tokens, fast)


def _sample_texts(shards: list[Shard], key: str, text_documents: str) -> Iterator[str]:
    """The same amount of text from each of some shards; what is bad is told when it is encoded."""
    chosen = shards[:: -(-len(shards) // TRAINING_SHARDS)]
    for shard in chosen:
        items = (item for part in shard.parts for item in inputs.read_part(part, key, text_documents, lists=True))
        texts = (item.text for item in items if isinstance(item, TextDocument))
        yield from _take_characters(texts, TRAINING_CHARACTERS // len(chosen))


def _take_characters(texts: Iterable[str], characters: int) -> Iterator[str]:
    for text in texts:
        yield text
        characters -= len(text)
        if characters <= 0:
            return
