"""Rotary position embedding: the frequencies of a model and the rotation of queries and keys.

Shape suffixes: B batch, S sequence, N heads, C channels of one head, R = C / 2 rotated pairs.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from primus.config.schema import ModelSpec


def frequencies(spec: ModelSpec, head_dim: int) -> Tensor:
    """Radians per position of each rotated pair, shape [C / 2], float32 on the CPU.

    Source: RoFormer (arXiv 2104.09864), section 3.2.2; Llama 3.1 scaling as in `_llama3`.
    """
    exponents_R = torch.arange(0, head_dim, 2, dtype=torch.float32, device="cpu") / head_dim
    frequencies_R = 1.0 / spec.rotary_base**exponents_R
    return _llama3(frequencies_R, spec) if spec.rope_type == "llama3" else frequencies_R


def angles(frequencies_R: Tensor, sequence: int) -> tuple[Tensor, Tensor]:
    """Cosine and sine of positions 0 .. sequence - 1, each of shape [S, 1, C / 2], float32."""
    positions_S = torch.arange(sequence, dtype=torch.float32, device=frequencies_R.device)
    angles_S1R = torch.outer(positions_S, frequencies_R).unsqueeze(1)
    return angles_S1R.cos(), angles_S1R.sin()


def _llama3(frequencies_R: Tensor, spec: ModelSpec) -> Tensor:
    """Long wavelengths stretched by the factor, short ones kept, those between interpolated.

    Source: meta-llama/llama-models `apply_scaling`; the same constants as `rope_scaling` in the published config.json.
    """
    low, high = spec.rope_low_freq_factor, spec.rope_high_freq_factor
    rotations_R = spec.original_max_position_embeddings * frequencies_R / (2 * math.pi)
    kept_R = ((rotations_R - low) / (high - low)).clamp(0.0, 1.0)
    return frequencies_R * (kept_R + (1.0 - kept_R) / spec.rotary_scaling_factor)
