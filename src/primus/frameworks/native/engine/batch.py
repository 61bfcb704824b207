"""Micro batches on the device of a process."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from primus.data.training.masks import INSTRUCTION_DIMENSIONS, split_inputs_and_targets
from primus.frameworks.native.engine.loss import IGNORED
from primus.frameworks.native.engine.pipeline import Batch


def to_batch(tokens_BS1: NDArray[np.int64], masked_input: int | None, device: torch.device) -> Batch:
    """Inputs and targets of a micro batch on `device`; nothing is to be predicted after `masked_input`.

    Of instruction data [B, 3, S + 1] only answers are targets; with several examples in a sequence, their
    numbers follow.
    """
    if tokens_BS1.ndim == INSTRUCTION_DIMENSIONS:
        from primus.data.instruction.dataset import COUNTED, EXAMPLE, TOKENS  # with tokenizers: for fine-tuning only

        tokens, counted, examples = (tokens_BS1[:, row] for row in (TOKENS, COUNTED, EXAMPLE))
        arrays = [tokens[:, :-1], np.where(counted[:, 1:], tokens[:, 1:], IGNORED)]
        if (examples > 1).any():
            arrays.append(examples[:, :-1])
        return tuple(_move_to_device(array, device) for array in arrays)
    inputs, targets = split_inputs_and_targets(tokens_BS1, masked_input)
    return _move_to_device(inputs, device), _move_to_device(targets, device)


def _move_to_device(array: NDArray[np.int64], device: torch.device) -> torch.Tensor:
    tensor = torch.from_numpy(np.ascontiguousarray(array))
    if device.type == "cpu":
        return tensor
    # Only a copy from pinned memory overlaps with computation.
    return tensor.pin_memory().to(device, non_blocking=True)
