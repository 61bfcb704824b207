"""Micro batches of the session as the tensors that a GPT model of megatron-core takes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from megatron.core import parallel_state
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.utils import get_batch_on_this_cp_rank
from numpy.typing import NDArray
from torch import Tensor

from primus.data.instruction.dataset import COUNTED, EXAMPLE, TOKENS
from primus.data.training.masks import INSTRUCTION_DIMENSIONS

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
    uses_transformer_engine: bool = False
    """Whether its attention is used, which takes lengths of examples instead of a mask."""


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
    packed: PackedSeqParams | None = None
    """Where each example of a row begins, for the attention of Transformer Engine; the batch is then one row."""


def iterate_batches(
    micro_batches: Sequence[NDArray[np.int64]], options: BatchOptions, device: torch.device
) -> Iterator[ModelBatch]:
    """The micro batches [B, S + 1], or [B, 3, S + 1] of instruction data, of one step, one after the other."""
    for micro_batch in micro_batches:
        samples = torch.from_numpy(np.ascontiguousarray(micro_batch))
        if samples.dim() == INSTRUCTION_DIMENSIONS:
            yield build_instruction_batch(samples, options, device)
        else:
            yield build_batch(samples, options, device)


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


def build_instruction_batch(samples: Tensor, options: BatchOptions, device: torch.device) -> ModelBatch:
    """One micro batch from samples [B, 3, S + 1] of `primus.data.instruction`: only answers count."""
    samples = samples.to(device, non_blocking=True)
    tokens, targets = samples[:, TOKENS, :-1].contiguous(), samples[:, TOKENS, 1:].contiguous()
    examples = samples[:, EXAMPLE, :-1]
    # The first token of an example never counts, so no prediction reaches over its border.
    loss_mask = samples[:, COUNTED, 1:].float()
    is_start = torch.ones_like(examples, dtype=torch.bool)
    is_start[:, 1:] = examples[:, 1:] != examples[:, :-1]
    places = torch.arange(tokens.shape[1], device=device).expand_as(tokens)
    positions = places - torch.where(is_start, places, 0).cummax(1).values
    batch = {"tokens": tokens, "labels": targets, "loss_mask": loss_mask, "position_ids": positions}
    mask, packed = None, None
    if (examples > 1).any():
        if options.uses_transformer_engine:
            batch = {name: part.reshape(1, -1) for name, part in batch.items()}
            packed = _describe_rows(is_start)
        else:
            mask = _separate(examples)
    elif parallel_state.get_context_parallel_world_size() > 1:
        batch = get_batch_on_this_cp_rank(batch)
    return ModelBatch(batch["tokens"], batch["labels"], batch["loss_mask"], batch["position_ids"], mask, packed)


def _describe_rows(is_start: Tensor) -> PackedSeqParams:
    """Places of the examples in all rows [B, S], laid out one after the other."""
    starts = is_start.reshape(-1).nonzero().reshape(-1)
    ends = torch.cat([starts, starts.new_tensor([is_start.numel()])]).int()
    longest = int((ends[1:] - ends[:-1]).max())
    return PackedSeqParams(
        qkv_format="thd", cu_seqlens_q=ends, cu_seqlens_kv=ends, max_seqlen_q=longest, max_seqlen_kv=longest
    )


def build_document_mask(tokens: Tensor, eod_id: int) -> Tensor:
    """True where a query must not see a key [B, 1, S, S]: a later key, or one of another document.

    The end of a document belongs to it.
    """
    ends = (tokens == eod_id).long()
    return _separate(ends.cumsum(1) - ends)


def _separate(parts: Tensor) -> Tensor:
    """True where a query must not see a key [B, 1, S, S]: a later key, or one of another part of the row [B, S]."""
    other = parts.unsqueeze(1) != parts.unsqueeze(2)
    size = parts.shape[1]
    later = torch.ones(size, size, dtype=torch.bool, device=parts.device).triu(1)
    return (other | later).unsqueeze(1)
