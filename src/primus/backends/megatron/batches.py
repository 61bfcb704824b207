"""Micro batches of the session as the tensors that a GPT model of megatron-core takes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from megatron.core import parallel_state
from megatron.core.utils import get_batch_on_this_cp_rank
from numpy.typing import NDArray
from torch import Tensor

IGNORED = 0
"""Weight of a prediction that does not count."""


class BatchOptions(NamedTuple):
    """How documents are treated."""

    masked_token: int | None
    """Token after which nothing is predicted; None if everything is."""
    separates_documents: bool
    """Whether tokens attend only to their own document."""
    eod_id: int | None
    """Token at the end of a document."""


class ModelBatch(NamedTuple):
    """One micro batch on the device; with context parallelism this process's part of each sequence."""

    tokens: Tensor
    """int64 [B, S]."""
    targets: Tensor
    """int64 [B, S]."""
    loss_mask: Tensor
    """float32 [B, S]: 1 where the prediction counts."""
    position_ids: Tensor
    """int64 [B, S]; rotary embedding ignores them."""
    attention_mask: Tensor | None
    """bool [B, 1, S, S], true where a query must not see a key; None for all earlier keys."""


def iterate_batches(
    micro_batches: Sequence[NDArray[np.int64]], options: BatchOptions, device: torch.device
) -> Iterator[ModelBatch]:
    """The micro batches [B, S + 1] of one step, one after the other."""
    for micro_batch in micro_batches:
        yield build_batch(torch.from_numpy(np.ascontiguousarray(micro_batch)), options, device)


def build_batch(samples: Tensor, options: BatchOptions, device: torch.device) -> ModelBatch:
    """One micro batch from samples [B, S + 1] on the host."""
    samples = samples.to(device, non_blocking=True)
    tokens, targets = samples[:, :-1].contiguous(), samples[:, 1:].contiguous()
    loss_mask = torch.ones(tokens.shape, dtype=torch.float32, device=device)
    if options.masked_token is not None:
        loss_mask[tokens == options.masked_token] = IGNORED
    positions = torch.arange(tokens.shape[1], device=device).expand_as(tokens)
    mask = None
    if options.separates_documents and options.eod_id is not None:
        mask = build_document_mask(tokens, options.eod_id)
    batch = {"tokens": tokens, "labels": targets, "loss_mask": loss_mask, "position_ids": positions}
    if parallel_state.get_context_parallel_world_size() > 1:
        batch = get_batch_on_this_cp_rank(batch)
    return ModelBatch(batch["tokens"], batch["labels"], batch["loss_mask"], batch["position_ids"], mask)


def build_document_mask(tokens: Tensor, eod_id: int) -> Tensor:
    """True where a query must not see a key [B, 1, S, S]: a later key, or one of another document.

    The end of a document belongs to it.
    """
    ends = (tokens == eod_id).long()
    document = ends.cumsum(1) - ends
    other = document.unsqueeze(1) != document.unsqueeze(2)
    size = tokens.shape[1]
    later = torch.ones(size, size, dtype=torch.bool, device=tokens.device).triu(1)
    return (other | later).unsqueeze(1)
