"""Computes the keys of the documents of each shard: the first stage, which reads and hashes all text."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from msgspec import Struct

from primus.data.filter.dedup import exact_hashes, minhash, normalized_words
from primus.data.filter.dedup.key_files import BlockWriter
from primus.data.filter.dedup.recipe import DedupRecipe
from primus.data.filter.whole_documents import DocumentReader, batch_documents
from primus.data.readers.shard import Shard
from primus.data.shards import inputs
from primus.data.shards.shard_queue import ShardOutput

BATCH_CHARACTERS = 1 << 18
"""Characters in a batch for hashing, few enough for a core's cache."""
SUFFIX = "keys"


class KeyFacts(Struct, frozen=True, kw_only=True):
    """What the stage states about a shard, besides counts."""

    blocks: list[int]
    """Number of documents in each block of its file."""
    contents: list[str]
    """Checksums of its input, by which a later run recognizes the same input; see `inputs.hash_contents`."""


@dataclass
class KeyStage:
    """Writes the keys of the documents of a shard; see `key_files` for the layout."""

    identity: Any
    recipe: DedupRecipe
    key: str
    """Field or column of the text."""
    text_documents: str
    """Unit that is a document in a .txt file."""

    def start(self) -> None:
        """Compile the kernels before the workers start, so that they inherit them."""
        compute_document_keys(["some words"], self.recipe)

    def run(self, shard: Shard, output: ShardOutput) -> None:
        """Write the keys of one shard."""
        reader = DocumentReader(self.key, self.text_documents, bad=output.record_bad)
        with output.path(SUFFIX).open("wb") as file:
            writer = BlockWriter(file)
            for batch in batch_documents(reader.read(shard), BATCH_CHARACTERS):
                texts = [each.text for each in batch]
                writer.add_keys(compute_document_keys(texts, self.recipe))
                output.add_counts(documents=len(texts), characters=sum(map(len, texts)))
            writer.flush()
        output.add_counts(empty=reader.empty)
        output.facts = KeyFacts(blocks=writer.sizes, contents=inputs.hash_contents(shard))


def compute_document_keys(texts: list[str], recipe: DedupRecipe) -> np.ndarray:
    """Compute the keys of documents.

    Returns:
        uint64 of (bands + 2) x documents; the last two rows are the exact hash.
    """
    needs_words = recipe.method == "minhash" or recipe.normalize
    encoded = [text.encode() for text in texts]
    hashes, firsts = (
        normalized_words.hash_words(encoded, recipe.normalize_numbers) if needs_words else (np.empty(0), np.empty(0))
    )
    whole = exact_hashes.hash_contents(encoded)
    if recipe.method == "minhash":
        keys = minhash.compute_band_keys(minhash.compute_signatures(hashes, firsts, recipe), recipe)
        wordless = firsts[1:] == firsts[:-1]
        keys[:, wordless] = whole[wordless, 0]  # without words, only an equal document is a duplicate
        return np.concatenate([keys, whole.T])
    if recipe.normalize:
        counts = np.diff(firsts)
        listed = [hashes[first : first + count].data for first, count in zip(firsts, counts, strict=False)]
        some = exact_hashes.hash_contents(
            each if len(each) else text for each, text in zip(listed, encoded, strict=True)
        )
        return some.T
    return whole.T
