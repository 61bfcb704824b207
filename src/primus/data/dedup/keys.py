"""Keys of documents for each shard: the first stage, and the one that reads and hashes all text."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from primus.data.dedup import compared, exact, minhash
from primus.data.dedup.blocks import BlockWriter
from primus.data.dedup.recipe import Recipe
from primus.data.pipeline import inputs
from primus.data.pipeline.shards import Shard
from primus.data.pipeline.whole_documents import Reader, batches
from primus.data.pipeline.work import Output

BATCH_CHARACTERS = 1 << 18
"""Characters that are hashed at a time: as many as stay in a core's cache."""
SUFFIX = "keys"


@dataclass
class KeyStage:
    """Writes the keys of a shard's documents; see `blocks` for their form."""

    identity: Any
    recipe: Recipe
    key: str
    """Field or column of the text."""
    text_documents: str
    """What is a document in a .txt file."""

    def start(self) -> None:
        """Compile what the workers then have."""
        document_keys(["some words"], self.recipe)

    def run(self, shard: Shard, output: Output) -> None:
        """Do one shard."""
        reader = Reader(self.key, self.text_documents, bad=output.bad)
        with output.path(SUFFIX).open("wb") as file:
            writer = BlockWriter(file)
            for batch in batches(reader.read(shard), BATCH_CHARACTERS):
                texts = [each.text for each in batch]
                writer.add(document_keys(texts, self.recipe))
                output.count(documents=len(texts), characters=sum(map(len, texts)))
            writer.flush()
        output.count(empty=reader.empty)
        output.facts["blocks"] = writer.sizes
        output.facts["contents"] = inputs.contents(shard)


def document_keys(texts: list[str], recipe: Recipe) -> np.ndarray:
    """Keys of documents.

    Returns:
        uint64 of (bands + 2) x documents; the last two rows are the exact hash.
    """
    needs_words = recipe.method == "minhash" or recipe.normalize
    encoded = [text.encode() for text in texts]
    hashes, firsts = (
        compared.word_hashes(encoded, recipe.normalize_numbers) if needs_words else (np.empty(0), np.empty(0))
    )
    whole = exact.digests(encoded)
    if recipe.method == "minhash":
        keys = minhash.band_keys(minhash.signatures(hashes, firsts, recipe), recipe)
        wordless = firsts[1:] == firsts[:-1]
        keys[:, wordless] = whole[wordless, 0]  # nothing but punctuation: repeated only by its equal
        return np.concatenate([keys, whole.T])
    if recipe.normalize:
        counts = np.diff(firsts)
        listed = [hashes[first : first + count].data for first, count in zip(firsts, counts, strict=False)]
        some = exact.digests(each if len(each) else text for each, text in zip(listed, encoded, strict=True))
        return some.T
    return whole.T
