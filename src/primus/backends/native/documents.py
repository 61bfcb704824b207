"""Documents in packed sequences: positions that restart at each document, and attention within a document.

A document ends with the end-of-document token, which belongs to it; what follows is position 0 of the next, as in
Megatron-LM's `_get_ltor_masks_and_position_ids` (megatron/core/datasets/gpt_dataset.py).

Shape suffixes: B batch, S sequence (of queries, then of keys).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from primus.config.schema import DataConfig


class DocumentHandling(NamedTuple):
    """Handling of the documents in a sequence."""

    eod_id: int
    """Token that ends a document."""
    reset_positions: bool
    """Count positions from 0 in each document."""
    reset_attention: bool
    """Let no token attend to another document."""


def compute_positions(tokens_BS: Tensor, eod_id: int) -> Tensor:
    """Position of each token within its document, [B, S]."""
    index_S = torch.arange(tokens_BS.shape[1], device=tokens_BS.device)
    # The token after an end begins a document. Its index, carried on by the running maximum, is subtracted from all.
    begins_BS = torch.zeros_like(tokens_BS, dtype=torch.bool)
    begins_BS[:, 1:] = tokens_BS[:, :-1] == eod_id
    return index_S - torch.where(begins_BS, index_S, 0).cummax(1).values


def build_attention_mask(tokens_BS: Tensor, eod_id: int) -> Tensor:
    """Whether a query may see a key: not later, and of the same document; [B, 1, S, S]."""
    # Number of the document of each token: the ends before it. An end belongs to the document that it ends, hence the
    # subtraction.
    ends_BS = (tokens_BS == eod_id).long()
    document_BS = ends_BS.cumsum(1) - ends_BS
    same_BSS = document_BS[:, :, None] == document_BS[:, None, :]
    return same_BSS.tril().unsqueeze(1)


def build_document_handling(data: DataConfig, eod_id: int | None) -> DocumentHandling | None:
    """How the model keeps documents apart; None if it does not."""
    if not data.reset_position_ids and not data.reset_attention_mask:
        return None
    assert eod_id is not None, "open_datasets has checked it"
    return DocumentHandling(eod_id, data.reset_position_ids, data.reset_attention_mask)
