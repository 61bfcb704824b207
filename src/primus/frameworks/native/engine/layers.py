"""What every part of the transformer is made of."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from primus.config.schema import ModelSpec
from primus.frameworks.native.engine import ops
from primus.frameworks.native.engine.cache import LayerCache
from primus.frameworks.native.engine.collectives import gather_context, leave_tensor_region
from primus.frameworks.native.engine.fp8 import Float8
from primus.frameworks.native.engine.layout import Axis, Layout
from primus.frameworks.native.engine.placement import share


class Linear(nn.Linear):
    """A projection in the dtype of its input, so that weights may be kept in float32; with an adapter, its sum too."""

    def __init__(self, in_features: int, out_features: int, bias: bool) -> None:
        super().__init__(in_features, out_features, bias)
        self.adapter: nn.Module | None = None
        self.float8: Float8 | None = None

    def multiply(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """The product with the weight, in 8 bits if that was chosen."""
        weight = self.weight.to(x.dtype)
        if self.float8 is None:
            return F.linear(x, weight, bias)
        y = self.float8.multiply(x, weight)
        return y if bias is None else y + bias

    def forward(self, x: Tensor) -> Tensor:
        y = self.multiply(x, None if self.bias is None else self.bias.to(x.dtype))
        return y if self.adapter is None else self.adapter(x, y, self)


class RowLinear(Linear):
    """A projection whose columns are divided over `layout.tensor`: its results add up, and the bias is added once."""

    def __init__(self, in_features: int, out_features: int, bias: bool, layout: Layout) -> None:
        super().__init__(share(in_features, layout.tensor), out_features, bias)
        self.layout = layout

    def forward(self, x: Tensor) -> Tensor:
        if self.layout.tensor.size == 1:
            return super().forward(x)
        y = leave_tensor_region(self.multiply(x), self.layout)
        return y if self.bias is None else y + self.bias.to(y.dtype)


class RMSNorm(nn.Module):
    """`ops.rms_norm` with a learned scale: the weight, or 1 + weight if it is centered at zero."""

    def __init__(self, width: int, epsilon: float, zero_centered: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.epsilon, self.zero_centered = epsilon, zero_centered

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight.to(ops.choose_wide_dtype(x.dtype)) + 1.0 if self.zero_centered else self.weight
        return ops.rms_norm(x, weight, self.epsilon)


def build_norm(spec: ModelSpec, width: int | None = None) -> RMSNorm:
    """A norm of the model; of its hidden states when no width is given."""
    return RMSNorm(width or spec.hidden_size, spec.norm_epsilon, spec.zero_centered_norms)


def attend(
    q_BHSC: Tensor,
    k_BKSC: Tensor,
    v_BKSC: Tensor,
    mask: Tensor | None,
    context: Axis,
    sinks_H: Tensor | None = None,
    cache: LayerCache | None = None,
    softcap: float | None = None,
    window: int | None = None,
) -> Tensor:
    """Causal attention of this process's queries to the keys of the whole sequence, which `context` shares.

    Shapes, `mask`, `sinks_H`, `softcap` and `window` are those of `ops.causal_attention`, S the part of a sequence in
    `take_context`; with a cache the keys are those of all its tokens.
    """
    if context.size > 1:
        whole = gather_context(torch.cat((k_BKSC, v_BKSC), -1), context, 2)
        k_BKSC, v_BKSC = whole.split((k_BKSC.shape[-1], v_BKSC.shape[-1]), -1)
    if cache is not None:
        k_BKSC, v_BKSC = cache.extend(k_BKSC, v_BKSC)
    if context.size == 1 or mask is not None:
        return ops.causal_attention(q_BHSC, k_BKSC, v_BKSC, mask, sinks_H, softcap, window)
    # Each of the two chunks sees the keys up to its own end.
    early, late = q_BHSC.chunk(2, 2)
    first_end = (context.rank + 1) * early.shape[2]
    last_end = (2 * context.size - context.rank) * late.shape[2]
    parts = [
        ops.causal_attention(q, k_BKSC[:, :, :end], v_BKSC[:, :, :end])
        for q, end in ((early, first_end), (late, last_end))
    ]
    return torch.cat(parts, 2)
