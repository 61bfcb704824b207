"""Rotary position embedding: the frequencies of a model, and the tables that rotate queries and keys.

Shape suffixes: S sequence, C channels of one head, R = C / 2 rotated pairs.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from primus.config.schema import ModelSpec


def compute_frequencies(spec: ModelSpec, head_dim: int) -> Tensor:
    """Radians per position of each rotated pair, shape [C / 2], float32 on the CPU.

    Source: RoFormer (arXiv 2104.09864), section 3.2.2; Llama 3.1 scaling as in `_scale_llama3_frequencies`.
    """
    exponents_R = torch.arange(0, head_dim, 2, dtype=torch.float32, device="cpu") / head_dim
    frequencies_R = 1.0 / spec.rotary_base**exponents_R
    return _scale_llama3_frequencies(frequencies_R, spec) if spec.rope_type == "llama3" else frequencies_R


def compute_tables(frequencies_R: Tensor, sequence: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosine and signed sine of positions 0 .. sequence - 1 for `ops.apply_rotary`, each of shape [S, 1, C].

    The pair (i, i + C / 2) of channels becomes (x cos - y sin, y cos + x sin): the sine of the first half is negative.
    """
    positions_S = torch.arange(sequence, dtype=frequencies_R.dtype, device=frequencies_R.device)
    angles_SR = torch.outer(positions_S, frequencies_R)
    cosine_SR, sine_SR = angles_SR.cos(), angles_SR.sin()
    cosine_SC, sine_SC = torch.cat((cosine_SR, cosine_SR), 1), torch.cat((-sine_SR, sine_SR), 1)
    return cosine_SC.unsqueeze(1).to(dtype), sine_SC.unsqueeze(1).to(dtype)


def _scale_llama3_frequencies(frequencies_R: Tensor, spec: ModelSpec) -> Tensor:
    """Long wavelengths stretched by the factor, short ones kept, those between interpolated.

    Source: meta-llama/llama-models `apply_scaling`; the same constants as `rope_scaling` in the published config.json.
    """
    low, high = spec.rope_low_freq_factor, spec.rope_high_freq_factor
    rotations_R = spec.original_max_position_embeddings * frequencies_R / (2 * math.pi)
    kept_R = ((rotations_R - low) / (high - low)).clamp(0.0, 1.0)
    return frequencies_R * (kept_R + (1.0 - kept_R) / spec.rotary_scaling_factor)
