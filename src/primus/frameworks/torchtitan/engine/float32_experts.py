"""Experts that compute in float32 where the experiment does: those of torchtitan convert to bfloat16 in any case."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torchtitan.models.common.moe import GroupedExperts
from torchtitan.models.gpt_oss.moe import GptOssGroupedExperts


class _NoConversion(TorchFunctionMode):
    """Lets `Tensor.bfloat16` return the tensor as it is."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        return args[0] if func is torch.Tensor.bfloat16 else func(*args, **(kwargs or {}))


class Float32Experts(GroupedExperts):
    """Experts of all models but gpt-oss."""

    @dataclass(kw_only=True, slots=True)
    class Config(GroupedExperts.Config):
        """As of experts in bfloat16."""

    def forward(self, x_RD: Tensor, num_tokens_per_expert_E: Tensor) -> Tensor:
        with _NoConversion():
            return super().forward(x_RD, num_tokens_per_expert_E)


class Float32SinkExperts(GptOssGroupedExperts):
    """Experts of gpt-oss."""

    @dataclass(kw_only=True, slots=True)
    class Config(GptOssGroupedExperts.Config):
        """As of experts in bfloat16."""

    def forward(self, x_RD: Tensor, num_tokens_per_expert_E: Tensor) -> Tensor:
        with _NoConversion():
            return super().forward(x_RD, num_tokens_per_expert_E)


def use_float32_experts(layers: Sequence[Any]) -> None:
    """Replace the experts in the configurations of a model's layers."""
    kinds = {GroupedExperts.Config: Float32Experts.Config, GptOssGroupedExperts.Config: Float32SinkExperts.Config}
    for routed in [layer.moe.routed_experts for layer in layers if getattr(layer, "moe", None) is not None]:
        inner = routed.inner_experts
        routed.inner_experts = kinds[type(inner)](**{field.name: getattr(inner, field.name) for field in fields(inner)})
