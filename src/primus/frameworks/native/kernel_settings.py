"""Settings of the kernels of a run: which are used, and how they are checked."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

AttentionBackend = Literal["auto", "flash", "fused", "efficient", "unfused"]

FP8_MULTIPLE = 16
"""Of every dimension of a product in 8 bits (cuBLASLt and hipBLASLt)."""


class KernelSettings(Struct, frozen=True, kw_only=True):
    """Which kernels a run uses; one that a device lacks is replaced, with a line and in the event `kernels`."""

    kernel_trial: Literal["auto", "always", "off"] = "auto"
    """Try the kernels against float64 before the first step, and stop if one is wrong; auto does so on a GPU."""
    attention_backend: AttentionBackend = "auto"
    """torch's attention: FlashAttention, cuDNN's (`fused`, as in Megatron-LM), memory-efficient, or plain products."""
    fp8_recipe: Literal["tensorwise", "rowwise", "delayed", "blockwise", "mxfp8"] = "tensorwise"
    """With `fp8`, numbers that share a scale: those of a matrix, or of each row; native refuses other recipes."""
    enable_primus_turbo: bool = False
    """With the switches below, name the kernels of native that do what Primus-Turbo's do; none of its own is used."""
    use_turbo_attention: bool = False
    """Attention."""
    use_turbo_rms_norm: bool = False
    """RMSNorm."""
    use_turbo_gemm: bool = False
    """Matrix products."""
    use_turbo_parallel_linear: bool = False
    """Matrix products, also those that are divided."""
    use_turbo_grouped_gemm: bool = False
    """Products of experts."""
    use_turbo_grouped_mlp: bool = False
    """Products of experts."""
    use_turbo_fused_act_with_probs: bool = False
    """Activation of experts times the score of the router."""
    use_turbo_deepep: bool = False
    """Exchange of tokens between experts."""
