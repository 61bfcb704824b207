"""Check the fast tokenizer in each run: a sample of the documents is encoded again by the reference tokenizer.

The sample depends only on the documents, so a repeated run checks the same ones, with any number of workers. A sample
may be checked in another process than the one that takes it.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from primus.data.tokenizers.tokenizer import Tokenizer
from primus.errors import PrimusError

FIRST = 4
"""Number of documents at the start that are always checked, so that systematic errors appear within seconds."""
ONE_IN = 1000
"""One in this many of the other documents is checked: about 4 % of the time, as the reference is 40 times slower."""
LONGEST = 1 << 16
"""Maximum number of characters of a document to check, up to the next safe cut; it bounds the time of one check."""


@dataclass(frozen=True)
class CanarySample:
    """A document to check, or the beginning of a long document."""

    name: str
    text: str
    tokens: NDArray[np.integer[Any]]
    """[n] token ids from the fast tokenizer; for a long document, more than those of `text`."""
    whole: bool
    """Whether `text` is the whole document."""
    add_special_tokens: bool
    """Whether the ids include the special tokens of the tokenizer's template."""


class Canary:
    """Samples a stream of documents, such as a shard."""

    def __init__(self, tokenizer: Tokenizer, add_special_tokens: bool = False) -> None:
        """Sample the documents that `tokenizer` encodes; the sample is empty if it does not use the fast path."""
        self.tokenizer = tokenizer
        self.add_special_tokens = add_special_tokens
        self.num_seen = 0

    def sample_batch(
        self,
        texts: Sequence[str],
        tokens: NDArray[np.integer[Any]],
        lengths: NDArray[np.int64],
        name_of: Callable[[int], str] = "text {}".format,
    ) -> list[CanarySample]:
        """Select the documents of a batch to check.

        Args:
            texts: The texts.
            tokens: [sum of lengths] token ids of the texts.
            lengths: [n] tokens of each text.
            name_of: Returns the name of a text by its index in the batch, for messages.
        """
        if self.tokenizer.fast is None:
            return []
        # Counted over all batches: the first documents of the stream, not of each batch.
        first = max(0, FIRST - self.num_seen)
        self.num_seen += len(texts)
        chosen = [place for place, text in enumerate(texts) if place < first or _is_drawn(text)]
        ends = np.cumsum(lengths)
        return [
            self._build_sample(name_of(place), texts[place], tokens[ends[place] - lengths[place] : ends[place]])
            for place in chosen
        ]

    def _build_sample(self, name: str, text: str, tokens: NDArray[np.integer[Any]]) -> CanarySample:
        # A template may add tokens at the end: the ids of a beginning would end with them, those of the whole do not.
        beginning = text if self.add_special_tokens else self.tokenizer.cut_safely(text, LONGEST)[0]
        # A copy: the caller reuses or frees the array of the batch, while the sample may wait for a check.
        return CanarySample(name, beginning, tokens.copy(), len(beginning) == len(text), self.add_special_tokens)


def check_samples(tokenizer: Tokenizer, samples: Sequence[CanarySample]) -> int:
    """Compare the ids of samples with those of the reference tokenizer, and return the number of samples.

    Raises:
        PrimusError: The ids of a sample differ.
    """
    for sample in samples:
        expected = tokenizer.exact.encode_batch([sample.text], sample.add_special_tokens)[0]
        # The beginning of a long document ends at a safe cut, so its ids are the first ids of the whole document.
        found = sample.tokens if sample.whole else sample.tokens[: len(expected)]
        if not np.array_equal(found, expected):
            raise _build_difference_error(tokenizer, sample, found, expected)
    return len(samples)


def _build_difference_error(
    tokenizer: Tokenizer, sample: CanarySample, found: NDArray[np.integer[Any]], expected: NDArray[np.uint32]
) -> PrimusError:
    shared = min(len(found), len(expected))
    differing = np.flatnonzero(found[:shared] != expected[:shared])
    place = int(differing[0]) if len(differing) else shared
    return PrimusError(
        f"{sample.name}: the fast tokenizer gives {found[place : place + 3].tolist()} at token {place} where "
        f"{tokenizer.name} gives {expected[place : place + 3].tolist()}; its other results may also be wrong",
        "use --no-fast, which is slower, and report this document",
    )


def _is_drawn(text: str) -> bool:
    """Select one text in `ONE_IN` by a checksum of its beginning and length: fast, and the same in every process."""
    return zlib.crc32(text[:64].encode(errors="surrogatepass"), len(text)) % ONE_IN == 0
