"""The policy from which a trained one must not drift too far."""

from __future__ import annotations

import torch
from torch import Tensor

from primus.frameworks.native.engine.loss import IGNORED
from primus.frameworks.native.engine.model import Transformer
from primus.frameworks.native.engine.post_training.token_scores import compute_token_scores


class ReferencePolicy:
    """A model whose weights stay.

    Args:
        model: With the weights that the run starts from.
        temperature: At which completions are drawn.
    """

    def __init__(self, model: Transformer, temperature: float) -> None:
        self._model, self._temperature = model, temperature

    @torch.no_grad()
    def score(self, tokens_BS: Tensor, targets_BS: Tensor) -> Tensor:
        """Log-probabilities [B, S] of the targets, float64; 0 where there are none."""
        is_counted_BS = targets_BS != IGNORED
        hidden_TD = self._model(tokens_BS)[is_counted_BS]
        scores = compute_token_scores(
            hidden_TD, self._model.output_weight, targets_BS[is_counted_BS], self._temperature
        )
        found_BS = torch.zeros(targets_BS.shape, dtype=torch.float64, device=tokens_BS.device)
        found_BS[is_counted_BS] = scores.log_probabilities_T.double()
        return found_BS
