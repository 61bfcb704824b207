"""Log-probabilities of tokens, whose logits are not in memory all at once.

Shape suffixes: T tokens, D model width, V vocabulary.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from primus.frameworks.native.engine.loss import choose_chunk
from primus.frameworks.native.engine.ops import choose_wide_dtype


class ScoredTokens(NamedTuple):
    """Of each token, under the model."""

    log_probabilities_T: Tensor
    """Of the distribution at `temperature`."""
    plain_T: Tensor
    """Of the distribution at temperature 1, without a gradient; as `generate` reports them."""
    entropies_T: Tensor
    """Of the distribution at `temperature`, without a gradient."""


def compute_token_scores(
    hidden_TD: Tensor, weight_VD: Tensor, targets_T: Tensor, temperature: float = 1.0
) -> ScoredTokens:
    """Scores of the tokens that follow hidden states.

    Logits of a chunk of tokens are in memory at once, and computed again in the backward pass.
    """
    weight_VD = weight_VD.to(hidden_TD.dtype)
    size = choose_chunk(weight_VD.shape[0], hidden_TD)
    chunks = zip(hidden_TD.split(size), targets_T.split(size), strict=True)
    parts = [
        checkpoint(_score_chunk, hidden, weight_VD, targets, temperature, use_reentrant=False)
        for hidden, targets in chunks
    ]
    return ScoredTokens(*(torch.cat(each) for each in zip(*parts, strict=True)))


def _score_chunk(hidden_TD: Tensor, weight_VD: Tensor, targets_T: Tensor, temperature: float) -> ScoredTokens:
    logits_TV, index_T1 = F.linear(hidden_TD, weight_VD), targets_T.unsqueeze(1)
    plain_TV = logits_TV.to(choose_wide_dtype(logits_TV.dtype))
    logs_TV = (plain_TV if temperature == 1.0 else plain_TV / temperature).log_softmax(1)
    chosen_T = logs_TV.gather(1, index_T1).squeeze(1)
    with torch.no_grad():
        plain_T = chosen_T
        if temperature != 1.0:
            plain_T = plain_TV.log_softmax(1).gather(1, index_T1).squeeze(1)
        entropies_T = -(logs_TV.exp() * logs_TV).sum(1)
    return ScoredTokens(chosen_T, plain_T.detach(), entropies_T)
