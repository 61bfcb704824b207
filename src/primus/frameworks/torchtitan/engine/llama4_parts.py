"""The parts of Llama 4 that torchtitan does not have since 0.3."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torchtitan.models.common import ComplexRoPE
from torchtitan.models.common.moe import RoutedExperts


class NoRoPE(ComplexRoPE):
    """The rotary embedding of a layer without one: queries and keys stay as they are."""

    @dataclass(kw_only=True, slots=True)
    class Config(ComplexRoPE.Config):
        """As of a layer with rotary embedding, whose length torchtitan sets."""

    def forward(self, query: Tensor, key: Tensor, positions: Tensor | None = None) -> tuple[Tensor, Tensor]:
        return query, key


class InputScaledExperts(RoutedExperts):
    """Experts whose input is multiplied by their score, with one expert of a token (transformers, `Llama4TextMoe`)."""

    @dataclass(kw_only=True, slots=True)
    class Config(RoutedExperts.Config):
        """As of experts whose output is multiplied."""

    def forward(
        self, x_BLD: Tensor, topk_scores_BLK: Tensor, topk_expert_ids_BLK: Tensor, num_local_tokens_per_expert_E: Tensor
    ) -> Tensor:
        scaled_BLD = x_BLD * topk_scores_BLK.to(x_BLD.dtype)
        ones_BLK = torch.ones_like(topk_scores_BLK)
        return super().forward(scaled_BLD, ones_BLK, topk_expert_ids_BLK, num_local_tokens_per_expert_E)
