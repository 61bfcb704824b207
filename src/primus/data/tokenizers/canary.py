"""The fast way is checked in each run: a sample of the documents, encoded again by the library that defines the ids."""

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
"""Documents at the start that are always checked."""
ONE_IN = 1000
"""Of the others one in as many: about 4 % of the time of a tokenizer that is forty times faster."""
LONGEST = 1 << 16
"""Characters of a document that are checked, up to the next place where it may be cut."""


@dataclass(frozen=True)
class CanarySample:
    """A document that is to be checked, or the beginning of a long one."""

    name: str
    text: str
    tokens: NDArray[np.integer[Any]]
    """[n] its ids; of a long document more than those of `text`."""
    whole: bool
    """Whether `text` is the whole document."""
    add_special_tokens: bool
    """Whether the ids have what the tokenizer's template puts around a text."""


class Canary:
    """Takes a sample of a stream of documents, such as a shard, which depends on nothing but the documents."""

    def __init__(self, tokenizer: Tokenizer, add_special_tokens: bool = False) -> None:
        """A sample of documents that `tokenizer` encodes; an empty one where it does not encode the fast way."""
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
        """The documents of a batch that are to be checked, perhaps by another process.

        Args:
            texts: The texts.
            tokens: [sum of lengths] their ids.
            lengths: [n] tokens of each.
            name_of: Gives the name of a text by its place in the batch, for the message.
        """
        if self.tokenizer.fast is None:
            return []
        first = max(0, FIRST - self.num_seen)
        self.num_seen += len(texts)
        chosen = [place for place, text in enumerate(texts) if place < first or _is_drawn(text)]
        ends = np.cumsum(lengths)
        return [
            self._build_sample(name_of(place), texts[place], tokens[ends[place] - lengths[place] : ends[place]])
            for place in chosen
        ]

    def _build_sample(self, name: str, text: str, tokens: NDArray[np.integer[Any]]) -> CanarySample:
        beginning = text if self.add_special_tokens else self.tokenizer.safe_cuts(text, LONGEST)[0]
        return CanarySample(name, beginning, tokens.copy(), len(beginning) == len(text), self.add_special_tokens)


def check_samples(tokenizer: Tokenizer, samples: Sequence[CanarySample]) -> int:
    """How many samples have the ids that the library which defines them gives: all.

    Raises:
        PrimusError: One has other ids.
    """
    for sample in samples:
        expected = tokenizer.exact.encode_batch([sample.text], sample.add_special_tokens)[0]
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
        f"{tokenizer.name} gives {expected[place : place + 3].tolist()}; nothing that it made can be trusted",
        "go on with --no-fast, which is slower, and report this document",
    )


def _is_drawn(text: str) -> bool:
    """One text in `ONE_IN`, by its beginning and length, so that any worker draws the same."""
    return zlib.crc32(text[:64].encode(errors="surrogatepass"), len(text)) % ONE_IN == 0
