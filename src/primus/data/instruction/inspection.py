"""What a sample of instruction data has: rows of the file, their prompts and answers, and the padding."""

from __future__ import annotations

from itertools import groupby

import numpy as np
from msgspec import Struct

from primus.data.instruction.dataset import COUNTED, EXAMPLE, TOKENS, InstructionDataset
from primus.data.tokenizers.tokenizer import Tokenizer
from primus.data.training.blending import BlendedDataset
from primus.data.training.packing import Dataset


class SampleSegment(Struct, frozen=True, kw_only=True):
    """Consecutive tokens of one example that all count in the loss, or all do not."""

    source: str
    """File of the example."""
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
    pieces: list[str]
    """Text of each token by itself; a token that is a part of a character has a replacement character."""


def list_segments(dataset: Dataset, number: int, tokenizer: Tokenizer) -> list[SampleSegment]:
    """The segments of a sample of instruction data in order, without its padding; nothing for other samples."""
    if isinstance(dataset, BlendedDataset):
        owner, number = dataset.locate_sample(number)
        dataset = dataset.datasets[owner]
    if not isinstance(dataset, InstructionDataset):
        return []
    sample, rows = dataset[number], dataset.list_rows(number)
    size = int(np.count_nonzero(sample[EXAMPLE]))
    segments, first = [], 0
    for (example, is_counted), part in groupby(sample[[EXAMPLE, COUNTED], :size].T.tolist(), key=tuple):
        count = len(list(part))
        ids = sample[TOKENS, first : first + count].tolist()
        segments.append(
            SampleSegment(
                source=dataset.source,
                row=rows[example],
                first_token=first,
                tokens=count,
                is_counted=bool(is_counted),
                text=tokenizer.decode_valid(ids),
                pieces=[tokenizer.decode_valid([token]) or f"<{token}>" for token in ids],
            )
        )
        first += count
    return segments
