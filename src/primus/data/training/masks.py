"""What is learnt of a batch: each token from those before it, but for what follows the end of a document.

Shape suffixes: B batch, S sequence.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def split_inputs_and_targets(
    tokens_BS1: NDArray[np.int64], masked_input: int | None = None
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Inputs [B, S] and targets [B, S] of a batch [B, S + 1]; a target of -100 is left out of the loss.

    Args:
        tokens_BS1: Samples of S + 1 tokens.
        masked_input: Token id after which nothing is to be predicted. The end-of-document token for `eod_mask_loss`,
            which in Megatron-LM masks the positions whose input is that token (`_get_ltor_masks_and_position_ids` in
            megatron/core/datasets/gpt_dataset.py): what follows belongs to an unrelated document.
    """
    inputs, targets = tokens_BS1[..., :-1], tokens_BS1[..., 1:]
    if masked_input is None:
        return inputs, targets
    return inputs, np.where(inputs == masked_input, -100, targets)
