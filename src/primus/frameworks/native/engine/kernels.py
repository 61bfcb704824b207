"""The choice of a run's kernels: what was asked for, what the device has, and what is used instead."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from primus.config.schema import Trainer
from primus.frameworks.native.engine.fp8 import Float8, choose_format
from primus.frameworks.native.engine.layers import Linear
from primus.frameworks.native.engine.model import Transformer
from primus.frameworks.native.kernel_settings import FP8_MULTIPLE, AttentionBackend, KernelSettings
from primus.models.counts import head_dim

ATTENTION = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "fused": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "unfused": SDPBackend.MATH,
}
SWITCHES = {
    "use_turbo_attention": "torch's attention (attention_backend)",
    "use_turbo_rms_norm": "RMSNorm in one pass",
    "use_turbo_gemm": "torch's matrix products",
    "use_turbo_parallel_linear": "torch's matrix products",
    "use_turbo_grouped_gemm": "torch's grouped products, on CPUs a product for each expert",
    "use_turbo_grouped_mlp": "torch's grouped products, on CPUs a product for each expert",
    "use_turbo_fused_act_with_probs": "scores inside of the activation",
    "use_turbo_deepep": "torch's all-to-all; DeepEP is not used",
}
"""What native does where Primus uses Primus-Turbo."""


class KernelChoice(NamedTuple):
    """The kernel that a setting asks for."""

    key: str
    asked: str
    used: str
    reason: str = ""
    """Why it is another one than asked for."""

    def format(self) -> str:
        return f"{self.key}: {self.asked}: {self.used}" + (f" ({self.reason})" if self.reason else "")


def choose_kernels(
    model: Transformer, trainer: Trainer, settings: KernelSettings, device: torch.device
) -> list[KernelChoice]:
    """Let a model, and torch's attention in this process, use the kernels of an experiment; what was asked for.

    Raises:
        UnfitError: The device has no 8-bit products.
    """
    found = []
    if settings.attention_backend != "auto":
        dtype = model.compute_dtype or next(model.parameters()).dtype
        has_masks = bool(model.documents or trainer.model.window_size or trainer.model.attention_sinks)
        found.append(choose_attention(settings.attention_backend, device, dtype, head_dim(trainer.model), has_masks))
    if trainer.training.fp8 is not None:
        number, unfit = use_float8(model, choose_format(trainer.training.fp8, settings.fp8_recipe, device))
        others = "the output head and experts compute in bf16"
        if device.type == "cpu":
            others = f"without fp8 hardware; {others}"
        if unfit:
            others += f", and so do {len(unfit)} matrices whose sizes are no multiples of {FP8_MULTIPLE}, as {unfit[0]}"
        found.append(
            KernelChoice("fp8", str(trainer.training.fp8), f"{number} matrices, {settings.fp8_recipe}", others)
        )
    if settings.enable_primus_turbo:
        asked = [name for name in SWITCHES if getattr(settings, name)]
        found += [KernelChoice(name, "true", SWITCHES[name], "native's own kernel") for name in asked]
    return found


def use_float8(model: nn.Module, found: Float8) -> tuple[int, list[str]]:
    """Let the layers' matrices multiply in this format: their number, and the names of those whose sizes do not fit."""
    linears = {
        name: each for name, each in model.named_modules() if isinstance(each, Linear) and name.startswith("layers.")
    }
    unfit = [name for name, each in linears.items() if any(size % FP8_MULTIPLE for size in each.weight.shape)]
    for name, each in linears.items():
        each.float8 = None if name in unfit else found
    return len(linears) - len(unfit), unfit


def choose_attention(
    asked: AttentionBackend, device: torch.device, dtype: torch.dtype, channels: int, has_masks: bool
) -> KernelChoice:
    """Restrict torch's attention in this process to a kernel, if the device has it for these values."""
    lacking = _find_lack(asked, device, dtype, channels, has_mask=False)
    if lacking:
        return KernelChoice("attention_backend", asked, "auto", lacking)
    used, reason = [asked], ""
    if has_masks and _find_lack(asked, device, dtype, channels, has_mask=True):
        used, reason = [asked, "efficient", "unfused"], f"{asked} takes no mask: those have others"
    enable_attention(used)
    return KernelChoice("attention_backend", asked, " or ".join(dict.fromkeys(used)), reason)


def enable_attention(names: Sequence[str]) -> None:
    """Let torch choose among these kernels of attention in this process."""
    torch.backends.cuda.enable_flash_sdp("flash" in names)
    torch.backends.cuda.enable_cudnn_sdp("fused" in names)
    torch.backends.cuda.enable_mem_efficient_sdp("efficient" in names)
    torch.backends.cuda.enable_math_sdp("unfused" in names)


def _find_lack(asked: str, device: torch.device, dtype: torch.dtype, channels: int, *, has_mask: bool) -> str:
    """Why a device does not have a kernel; empty if it has."""
    q = torch.zeros(1, 1, 16, channels, dtype=dtype, device=device, requires_grad=True)
    mask = torch.ones(1, 1, 16, 16, dtype=torch.bool, device=device).tril() if has_mask else None
    try:
        with sdpa_kernel(ATTENTION[asked]):
            F.scaled_dot_product_attention(q, q, q, mask, is_causal=mask is None).sum().backward()
    except RuntimeError as error:
        return str(error).partition(".")[0]
    return ""
