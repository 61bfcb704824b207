"""Keys and values of the tokens that a model has seen, so that the next token costs one pass over itself.

Sequences begin at position 0 whatever their length, so that tokens have the positions that they have in training. What
stands behind the end of a shorter prompt is overwritten before a query sees it.

Shape suffixes: B batch, S tokens of a pass, K key/value heads, T tokens of the cache, C channels of one head.
"""

from __future__ import annotations

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
            batch, heads, length, _ = k_BKSC.shape
            # Zeros, because a weight of 0 does not hide what is not a number.
            # At the first pass: a process of a sharded model has some of the heads.
            self.k_BKTC, self.v_BKTC = (
                x.new_zeros((batch, heads, shared.length, x.shape[-1])) for x in (k_BKSC, v_BKSC)
            )
            shared.num_bytes += sum(x.numel() * x.element_size() for x in (self.k_BKTC, self.v_BKTC))
            self.k_BKTC[:, :, :length], self.v_BKTC[:, :, :length] = k_BKSC, v_BKSC
            return k_BKSC, v_BKSC
        rows_B1 = torch.arange(len(shared.positions_BS), device=k_BKSC.device).unsqueeze(1)
        for cached_BKTC, new_BKSC in ((self.k_BKTC, k_BKSC), (self.v_BKTC, v_BKSC)):
            cached_BKTC.transpose(1, 2)[rows_B1, shared.positions_BS] = new_BKSC.transpose(1, 2)
        return self.k_BKTC[:, :, : shared.end], self.v_BKTC[:, :, : shared.end]

    def keep(self, rows: Tensor) -> None:
        """Drop all other sequences."""
        self.k_BKTC, self.v_BKTC = self.k_BKTC[rows], self.v_BKTC[rows]


class KeyValueCache:
    """The caches of all layers, for the model whose `cache` it is.

    Args:
        num_layers: Of the model.
        length: Tokens that it holds for each sequence.
        tables: Rotary tables of layers without and with a window, of as many positions.
    """

    def __init__(self, num_layers: int, length: int, tables: list[tuple[Tensor, Tensor]]) -> None:
        self.length, self.end = length, length
        self.positions_BS: Tensor | None = None
        """Of the tokens of the next pass; None for the first pass, whose tokens begin at 0."""
        self.num_bytes = 0
        """Memory of the cache, before sequences are dropped."""
        self._tables = tables
        self.layers = [LayerCache(self) for _ in range(num_layers)]

    def advance(self, positions: list[int], num_tokens: int) -> None:
        """Set the positions of the next pass: `num_tokens` of each sequence, from its own on."""
        begins_B1 = torch.tensor(positions, device=self._tables[0][0].device).unsqueeze(1)
        self.positions_BS = begins_B1 + torch.arange(num_tokens, device=begins_B1.device)
        self.end = max(positions) + num_tokens

    def keep(self, rows: Tensor) -> None:
        """Drop all other sequences."""
        for layer in self.layers:
            layer.keep(rows)

    def rotate(self, positions_BS: Tensor, dtype: torch.dtype) -> list[tuple[Tensor, Tensor]]:
        """Cosine and sine of some of the positions of a pass, [B, S, 1, C], of each of the tables."""
        return [(cosine[positions_BS].to(dtype), sine[positions_BS].to(dtype)) for cosine, sine in self._tables]

    def build_mask(self, window: int | None) -> Tensor:
        """Which of the cached keys each query of a pass sees, [B, 1, S, T]."""
        assert self.positions_BS is not None
        positions_BS1 = self.positions_BS.unsqueeze(-1)
        keys_T = torch.arange(self.end, device=positions_BS1.device)
        visible_BST = keys_T <= positions_BS1
        if window is not None:
            visible_BST &= keys_T > positions_BS1 - window
        return visible_BST.unsqueeze(1)
