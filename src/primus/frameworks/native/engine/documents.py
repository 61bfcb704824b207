"""Documents or examples in packed sequences: positions that restart at each, and attention within each.

A document ends with the end-of-document token, which belongs to it; what follows is position 0 of the next, as in
Megatron-LM's `_get_ltor_masks_and_position_ids` (megatron/core/datasets/gpt_dataset.py).

Shape suffixes: B batch, S sequence (of queries, then of keys).
"""

from __future__ import annotations

import torch
from torch import Tensor


def number_documents(tokens_BS: Tensor, eod_id: int) -> Tensor:
    """Number of the document of each token, [B, S]: the ends before it. An end belongs to the document that it ends."""
    ends_BS = (tokens_BS == eod_id).long()
    return ends_BS.cumsum(1) - ends_BS


def compute_positions(document_BS: Tensor) -> Tensor:
    """Position of each token within its document, [B, S]."""
    index_S = torch.arange(document_BS.shape[1], device=document_BS.device)
    # The index of a document's first token, carried on by the running maximum, is subtracted from all.
    begins_BS = torch.zeros_like(document_BS, dtype=torch.bool)
    begins_BS[:, 1:] = document_BS[:, 1:] != document_BS[:, :-1]
    return index_S - torch.where(begins_BS, index_S, 0).cummax(1).values


def limit_to_window(mask: Tensor | None, window: int, length: int, device: torch.device) -> Tensor:
    """Which of the keys of `mask` (None: all that are not later) are among the last `window`; [B or 1, 1, S, S]."""
    visible = torch.ones((1, 1, length, length), dtype=torch.bool, device=device).tril() if mask is None else mask
    return visible.triu(1 - window)


def build_attention_mask(document_BS: Tensor) -> Tensor:
    """Whether a query may see a key: not later, and of the same document; [B, 1, S, S]."""
    same_BSS = document_BS[:, :, None] == document_BS[:, None, :]
    return same_BSS.tril().unsqueeze(1)
