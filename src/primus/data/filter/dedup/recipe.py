"""The recipe of a deduplication: the definition of duplicates."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

from primus.errors import UsageError

VERSION = 1
"""Version of the signatures: in another version, the same text and recipe give other signatures."""

MOST_HASHES = 4096
MAX_REMOVED = 0.5
"""Share of documents that are removed as near-duplicates without being asked: a choice of this package. Beyond it, that
documents differ in their numbers only is likelier than a corpus of copies."""


class DedupRecipe(Struct, frozen=True, kw_only=True):
    """Settings that define duplicates."""

    method: Literal["exact", "minhash"] = "minhash"
    """Compare whole texts, or use MinHash and locality-sensitive hashing (Broder 1997; Indyk and Motwani 1998)."""
    bands: int = 14
    """Bands of the signature: documents with one band in common are duplicates."""
    rows: int = 8
    """Minima in a band. FineWeb uses 14 x 8."""
    ngram: int = 5
    """Words of a shingle."""
    seed: int = 1
    """Seed of the hash functions."""
    normalize: bool = False
    """For the exact method: compare words without case, accents, punctuation and spacing, as MinHash does."""
    normalize_numbers: bool = True
    """If words are compared: take any number as 0, also within a word, as FineWeb's recipe in datatrove does."""

    @property
    def num_hashes(self) -> int:
        """Minima of a signature."""
        return self.bands * self.rows

    @property
    def threshold(self) -> float:
        """Jaccard similarity at which about two thirds of the pairs are found, (1 / bands) ** (1 / rows)."""
        return float((1 / self.bands) ** (1 / self.rows))

    def estimate_probability(self, similarity: float) -> float:
        """Probability that two documents of this Jaccard similarity have a band in common."""
        return float(1 - (1 - similarity**self.rows) ** self.bands)

    def check(self) -> None:
        """Check the ranges of the settings.

        Raises:
            UsageError: A setting is out of range.
        """
        if self.method not in ("exact", "minhash"):
            raise UsageError(f"method '{self.method}'", "valid: exact, minhash")
        for name in ("bands", "rows", "ngram"):
            if getattr(self, name) < 1:
                raise UsageError(f"{name} {getattr(self, name)}", "give a number of 1 or more")
        if not 0 <= self.seed < 1 << 32:
            raise UsageError(f"seed {self.seed}", "give a number from 0 to 4294967295")
        if self.num_hashes > MOST_HASHES:
            raise UsageError(f"{self.bands} bands of {self.rows} rows", f"at most {MOST_HASHES} hashes in all")
