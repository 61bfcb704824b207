"""Train a tokenizer on the text of a job, once for all processes of the job."""

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
"""Prefix of a tokenizer name that requests training."""

TRAINING_CHARACTERS = 32_000_000
"""Maximum number of characters to train on; more needs memory and changes the vocabulary little."""

TRAINING_SHARDS = 64
"""Maximum number of shards to take text from, evenly spread over the input."""


def is_trained(name: str) -> bool:
    """Whether a tokenizer name requests training."""
    return name.startswith(BPE)


def check(name: str, eod: str | None) -> None:
    """Check the name of a tokenizer that is to be trained.

    Raises:
        UsageError: The name has no vocabulary size, or `eod` is not the token that trained tokenizers have.
    """
    if not name.removeprefix(BPE).isdecimal():
        raise UsageError(f"tokenizer '{name}'", "give the number of tokens, like bpe:8192")
    if eod not in (None, END_OF_TEXT):
        raise UsageError(f"a trained tokenizer has {END_OF_TEXT}, not {eod}", "remove --eod")


def train_tokenizer_once(
    name: str, text: Inputs, keys: Iterable[str], recipe: EncodeRecipe, folder: Path, fast: bool
) -> Tokenizer:
    """Train a byte-level BPE on the text, or load it from `folder` if another process has trained it.

    Call it with the lock of the output held: one process trains, the others wait for the lock and load the result.

    Args:
        name: ``bpe:VOCAB``.
        text: Input to train on.
        keys: Fields of a record that hold text.
        recipe: Settings that divide files into documents.
        folder: Work folder of the job, which all its processes share.
        fast: Whether to use the fast path.
    """
    keys = tuple(keys)
    digest = hashlib.sha256(repr((name, text.identity, keys, recipe.text_documents)).encode()).hexdigest()
    # The name has a digest of everything that determines the result, so a file of this name is never another tokenizer.
    path = folder / f"tokenizer-{digest[:16]}.json"
    if not path.is_file():
        from primus.data.tokenizers.trained import train_byte_level_bpe

        pieces = (piece for key in keys for piece in _sample_texts(text.shards, key, recipe.text_documents))
        trained = train_byte_level_bpe(pieces, int(name.removeprefix(BPE)))
        path.parent.mkdir(exist_ok=True)  # now: a process that has published meanwhile removes an unused folder
        with atomic.stage_files({path: trained.content}) as publish:
            publish()
    return parse_tokenizer(path.read_bytes(), name, END_OF_TEXT, recipe.parse_special_tokens, fast)


def _sample_texts(shards: list[Shard], key: str, text_documents: str) -> Iterator[str]:
    """Equal amounts of text from evenly spaced shards. Bad documents are skipped; encoding reports them."""
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
