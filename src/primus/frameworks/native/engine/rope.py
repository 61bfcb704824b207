"""Rotary position embedding: the frequencies of a model, and the tables that rotate queries and keys.

Shape suffixes: S sequence, C channels of one head, R = C / 2 rotated pairs.
"""

from __future__ import annotations

import math

import torch
from msgspec import structs
from torch import Tensor

from primus.config.schema import ModelSpec
from primus.models.counts import head_dim


def compute_frequencies(spec: ModelSpec, channels: int) -> Tensor:
    """Radians per position of each rotated pair, shape [C / 2], float32 on the CPU.

    Source: RoFormer (arXiv 2104.09864), section 3.2.2; scaling as in the functions below.
    """
    exponents_R = torch.arange(0, channels, 2, dtype=torch.float32, device="cpu") / channels
    frequencies_R = 1.0 / spec.rotary_base**exponents_R
    if spec.rope_type == "yarn":
        return _scale_yarn_frequencies(frequencies_R, spec)
    if spec.rope_type == "linear":  # positions are divided (arXiv 2306.15595, equation 4)
        return frequencies_R / spec.rotary_scaling_factor
    return _scale_llama3_frequencies(frequencies_R, spec) if spec.rope_type == "llama3" else frequencies_R


def compute_window_frequencies(spec: ModelSpec, channels: int) -> Tensor:
    """Those of the layers with a window, which may have a theta of their own that is not scaled (Gemma 3)."""
    if spec.window_rotary_base is None:
        return compute_frequencies(spec, channels)
    return compute_frequencies(
        structs.replace(spec, rotary_base=spec.window_rotary_base, rope_type="default"), channels
    )


def count_rotary_channels(spec: ModelSpec) -> int:
    """Channels of a head that are rotated."""
    return (spec.qk_pos_emb_head_dim or 0) if spec.multi_latent_attention else head_dim(spec)


def compute_table_scale(spec: ModelSpec) -> float:
    """Factor of cosine and sine: 0.1 ln(factor) + 1 with yarn, unless another scale of the scores replaces it."""
    return compute_yarn_scale(spec, spec.mscale) / compute_yarn_scale(spec, spec.mscale_all_dim)


def compute_yarn_scale(spec: ModelSpec, mscale: float) -> float:
    """0.1 mscale ln(factor) + 1 (yarn, arXiv 2309.00071, section 3.4, with DeepSeek's mscale); 1 without yarn."""
    if spec.rope_type != "yarn" or spec.rotary_scaling_factor <= 1.0:
        return 1.0
    return 0.1 * mscale * math.log(spec.rotary_scaling_factor) + 1.0


def compute_tables(
    frequencies_R: Tensor, sequence: int, dtype: torch.dtype, scale: float = 1.0
) -> tuple[Tensor, Tensor]:
    """`scale` x cosine and signed sine of positions 0 .. sequence - 1 for `ops.apply_rotary`, each [S, 1, C].

    The pair (i, i + C / 2) of channels becomes (x cos - y sin, y cos + x sin): the sine of the first half is negative.
    """
    positions_S = torch.arange(sequence, dtype=frequencies_R.dtype, device=frequencies_R.device)
    angles_SR = torch.outer(positions_S, frequencies_R)
    cosine_SR, sine_SR = angles_SR.cos() * scale, angles_SR.sin() * scale
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


def _scale_yarn_frequencies(frequencies_R: Tensor, spec: ModelSpec) -> Tensor:
    """Pairs that turn often are kept, those that turn rarely are divided by the factor, with a ramp between.

    Source: yarn (arXiv 2309.00071), section 3.2; transformers `_compute_yarn_parameters`.
    """

    def find_pair(rotations: float) -> float:
        """Where a pair turns so often over the original context, counted in pairs."""
        turns = spec.original_max_position_embeddings / (rotations * 2 * math.pi)
        return len(frequencies_R) * math.log(turns) / math.log(spec.rotary_base)

    low, high = find_pair(spec.beta_fast), find_pair(spec.beta_slow)
    if spec.yarn_correction_range_round_to_int:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, 2 * len(frequencies_R) - 1)
    pairs_R = torch.arange(len(frequencies_R), dtype=torch.float32)
    # 0.001: a ramp of no width would divide by zero.
    scaled_R = ((pairs_R - low) / (high - low or 0.001)).clamp(0.0, 1.0)
    return frequencies_R * (1.0 - scaled_R) + frequencies_R / spec.rotary_scaling_factor * scaled_R
