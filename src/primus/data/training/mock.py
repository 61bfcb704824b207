"""Random tokens instead of data, for speed measurements."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from primus.data.permutation import mix_numbers
from primus.data.training.packing import Piece, TokenFileProgress


class MockDataset:
    """Random tokens, a pure function of the seed and the sample's number."""

    def __init__(self, vocab_size: int, seq_length: int, seed: int = 0) -> None:
        self.vocab_size, self.seq_length, self.seed = vocab_size, seq_length, seed
        self.samples_per_epoch = 1 << 62

    def __getitem__(self, index: int) -> NDArray[np.int64]:
        random = np.random.Generator(np.random.Philox(key=mix_numbers(self.seed, index)))
        return random.integers(0, self.vocab_size, self.seq_length + 1, dtype=np.int64)

    def find_pieces(self, index: int) -> list[Piece]:
        """None: the tokens come from no file."""
        return []

    def compute_progress(self, num_samples: int) -> list[TokenFileProgress]:
        """None: the tokens come from no file."""
        return []
