"""The arithmetic between the matrix products: normalisation, rotation and activation.

Shape suffixes: B batch, S sequence, N heads, C channels of one head, R = C / 2, F feed-forward.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """x / rms(x) * weight over the last dimension, statistics in float32 (arXiv 1910.07467, equation 4)."""
    wide = x.float()
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + epsilon)
    return (wide * scale).to(x.dtype) * weight.to(x.dtype)


def swiglu(gate_up_F2: Tensor) -> Tensor:
    """silu(gate) * up, where gate and up are the halves of the last dimension (arXiv 2002.05202, equation 6)."""
    gate, up = gate_up_F2.chunk(2, -1)
    return F.silu(gate) * up


def rotate(x_BSNC: Tensor, cosine_S1R: Tensor, sine_S1R: Tensor) -> Tensor:
    """Each pair (i, i + C / 2) of channels turned by its position's angle; the pairing of Hugging Face weights."""
    first, second = x_BSNC.chunk(2, -1)
    cosine, sine = cosine_S1R.to(x_BSNC.dtype), sine_S1R.to(x_BSNC.dtype)
    return torch.cat((first * cosine - second * sine, second * cosine + first * sine), -1)
