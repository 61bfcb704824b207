"""Keys and values of the tokens that a model has seen, so that the next token costs one pass over itself.

Tokens have the positions that they have in training: those of each sequence begin at 0. In the cache, prompts end at
the same column, so that the next tokens of all sequences are written side by side. What stands behind the last column
is overwritten before a query sees it.

Shape suffixes: B batch, S tokens of a pass, K key/value heads, T columns of the cache, C channels of one head.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class LayerCache:
    """Keys and values of one layer.

    Args:
        shared: The cache of the model.
    """

    def __init__(self, shared: KeyValueCache) -> None:
        self._shared = shared
        self.k_BKTC = self.v_BKTC = torch.empty(0)

    def extend(self, k_BKSC: Tensor, v_BKSC: Tensor) -> tuple[Tensor, Tensor]:
        """Store keys and values of a pass; returns those that its queries may see."""
        shared = self._shared
        if shared.positions_BS is None:
            # At the first pass: a process of a sharded model has some of the heads.
            self.k_BKTC, self.v_BKTC = (self._allocate(x) for x in (k_BKSC, v_BKSC))
            return k_BKSC, v_BKSC
        first, end = shared.end - k_BKSC.shape[2], shared.end
        self.k_BKTC[:, :, first:end] = k_BKSC
        self.v_BKTC[:, :, first:end] = v_BKSC
        return self.k_BKTC[:, :, :end], self.v_BKTC[:, :, :end]

    def _allocate(self, x_BKSC: Tensor) -> Tensor:
        shared = self._shared
        batch, heads, _, channels = x_BKSC.shape
        cached_BKTC = x_BKSC.new_empty((batch, heads, shared.length, channels))
        shared.num_bytes += cached_BKTC.numel() * cached_BKTC.element_size()
        # What is left of a shorter prompt is hidden, and a number: a weight of 0 does not hide what is not.
        columns_BW = torch.arange(shared.width, device=x_BKSC.device) - shared.begins_B.unsqueeze(1)
        index = columns_BW.clamp_min_(0)[:, None, :, None].expand(-1, heads, -1, channels)
        cached_BKTC[:, :, : shared.width] = x_BKSC.gather(2, index)
        return cached_BKTC

    def keep(self, rows: Tensor) -> None:
        """Drop all other sequences."""
        self.k_BKTC, self.v_BKTC = self.k_BKTC[rows], self.v_BKTC[rows]


class KeyValueCache:
    """The caches of all layers, for the model whose `cache` it is.

    Args:
        num_layers: Of the model.
        lengths: Tokens of each prompt.
        num_further: Columns for the tokens after the longest prompt.
        tables: Rotary tables of layers without and with a window, of as many positions as there are columns.
    """

    def __init__(
        self, num_layers: int, lengths: Sequence[int], num_further: int, tables: list[tuple[Tensor, Tensor]]
    ) -> None:
        self.width = max(lengths)
        self.length, self.end = self.width + num_further, self.width
        device = tables[0][0].device
        self.begins_B = self.width - torch.tensor(lengths, device=device)
        """First column of each sequence."""
        self.positions_BS: Tensor | None = None
        """Of the tokens of the next pass; None for the first pass, whose tokens begin at 0."""
        self.num_bytes = 0
        """Memory of the cache, before sequences are dropped."""
        self._columns_T = torch.arange(self.length, device=device)
        self._tables = tables
        self.layers = [LayerCache(self) for _ in range(num_layers)]

    def advance(self, num_new: int, num_tokens: int) -> None:
        """Set the positions of the next pass: `num_tokens` of each sequence, `num_new` tokens behind its prompt."""
        first = self.width + num_new
        self.end = first + num_tokens
        self.positions_BS = self._columns_T[first : self.end] - self.begins_B.unsqueeze(1)

    def keep(self, rows: Tensor) -> None:
        """Drop all other sequences."""
        self.begins_B = self.begins_B[rows]
        for layer in self.layers:
            layer.keep(rows)

    def rotate(self, positions_BS: Tensor, dtype: torch.dtype) -> list[tuple[Tensor, Tensor]]:
        """Cosine and sine of some of the positions of a pass, [B, S, 1, C], of each of the tables."""
        return [(cosine[positions_BS].to(dtype), sine[positions_BS].to(dtype)) for cosine, sine in self._tables]

    def build_mask(self, window: int | None) -> Tensor:
        """Which of the cached keys each query of a pass sees, [B, 1, S, T]."""
        assert self.positions_BS is not None
        keys_T = self._columns_T[: self.end]
        queries_S1 = self._columns_T[self.end - self.positions_BS.shape[1] : self.end].unsqueeze(1)
        visible_ST = keys_T <= queries_S1
        if window is not None:
            visible_ST &= keys_T > queries_S1 - window
        return (visible_ST & (keys_T >= self.begins_B[:, None, None])).unsqueeze(1)
