"""Modules that every part of the transformer is made of."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from primus.frameworks.native.engine import ops


class Linear(nn.Linear):
    """A projection in the dtype of its input, so that weights may be kept in float32; with an adapter, its sum too."""

    def __init__(self, in_features: int, out_features: int, bias: bool) -> None:
        super().__init__(in_features, out_features, bias)
        self.adapter: nn.Module | None = None

    def forward(self, x: Tensor) -> Tensor:
        bias = None if self.bias is None else self.bias.to(x.dtype)
        y = F.linear(x, self.weight.to(x.dtype), bias)
        return y if self.adapter is None else y + self.adapter(x)


class RMSNorm(nn.Module):
    """`ops.rms_norm` with a learned scale."""

    def __init__(self, width: int, epsilon: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.epsilon = epsilon

    def forward(self, x: Tensor) -> Tensor:
        return ops.rms_norm(x, self.weight, self.epsilon)
