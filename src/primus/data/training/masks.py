"""Splits batches into inputs and targets, and masks the targets after the end of a document.

Shape suffixes: B batch, S sequence.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from primus.config.schema import DataConfig

INSTRUCTION_DIMENSIONS = 3
"""Of a micro batch of instruction data [B, 3, S + 1]."""


class DocumentHandling(NamedTuple):
    """Handling of the documents in a sequence."""

    eod_id: int
    """Token that ends a document."""
    reset_positions: bool
    """Count positions from 0 in each document."""
    reset_attention: bool
    """Let no token attend to another document."""


def split_inputs_and_targets(
    tokens_BS1: NDArray[np.int64], masked_input: int | None = None
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Inputs [B, S] and targets [B, S] of a batch [B, S + 1]. The loss ignores a target of -100.

    Args:
        tokens_BS1: Samples of S + 1 tokens.
        masked_input: Input token whose targets are masked: the end-of-document token for `eod_mask_loss`, because the
            next token belongs to an unrelated document. As in Megatron-LM (`_get_ltor_masks_and_position_ids` in
            megatron/core/datasets/gpt_dataset.py), the input decides, not the target.
    """
    inputs, targets = tokens_BS1[..., :-1], tokens_BS1[..., 1:]
    if masked_input is None:
        return inputs, targets
    return inputs, np.where(inputs == masked_input, -100, targets)


def compute_document_positions(tokens_BS: NDArray[np.int64], eod_id: int | None) -> NDArray[np.int64]:
    """Position of each token within its document, [B, S]; without `eod_id` all are of one document.

    The end-of-document token belongs to the document that it ends.
    """
    index_S = np.arange(tokens_BS.shape[-1])
    begins_BS = np.zeros(tokens_BS.shape, dtype=bool)
    begins_BS[..., 1:] = tokens_BS[..., :-1] == eod_id
    return index_S - np.maximum.accumulate(np.where(begins_BS, index_S, 0), axis=-1)


def build_document_handling(data: DataConfig, eod_id: int | None) -> DocumentHandling | None:
    """How the model keeps documents apart; None if it does not. Samples of instruction data say their examples."""
    if data.sft_data_path or not (data.reset_position_ids or data.reset_attention_mask):
        return None
    assert eod_id is not None, "open_datasets has checked it"
    return DocumentHandling(eod_id, data.reset_position_ids, data.reset_attention_mask)
