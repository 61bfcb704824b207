"""What a sample of instruction data has: rows of the file, their prompts and answers, and the padding."""

from __future__ import annotations

from itertools import groupby

import numpy as np
from msgspec import Struct

from primus.data.instruction.dataset import COUNTED, EXAMPLE, TOKENS, InstructionDataset
from primus.data.tokenizers.tokenizer import Tokenizer


class SampleSegment(Struct, frozen=True, kw_only=True):
    """Consecutive tokens of one example that all count in the loss, or all do not."""

    row: int
    """Line of the example in its file, from 1."""
    first_token: int
    """Place of its first token in the sample."""
    tokens: int
    """Number of tokens."""
    is_counted: bool
    """Whether the predictions of these tokens count: they are an answer, with the token that ends it."""
    text: str | None
    """Decoded text; None if an id is outside the vocabulary."""


def list_segments(dataset: InstructionDataset, number: int, tokenizer: Tokenizer) -> list[SampleSegment]:
    """The segments of a sample in order, without its padding."""
    sample, rows = dataset[number], dataset.list_rows(number)
    size = int(np.count_nonzero(sample[EXAMPLE]))
    segments, first = [], 0
    for (example, is_counted), part in groupby(sample[[EXAMPLE, COUNTED], :size].T.tolist(), key=tuple):
        count = len(list(part))
        ids = sample[TOKENS, first : first + count].tolist()
        segments.append(
            SampleSegment(
                row=rows[example - 1],
                first_token=first,
                tokens=count,
                is_counted=bool(is_counted),
                text=tokenizer.decode_valid(ids),
            )
        )
        first += count
    return segments
