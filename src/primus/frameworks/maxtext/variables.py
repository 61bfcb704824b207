"""MaxText: JAX, with Transformer Engine on AMD. XLA_FLAGS is left to the user."""

from __future__ import annotations

from primus.machine.profile import Library, Profile, Setting
from primus.machine.workload import JobWorkload

LIBRARIES: tuple[Library, ...] = ("transformer engine",)
SPEC = "AMD-AGI/Primus backends/maxtext/env_spec.py"

EVERYWHERE = {
    "XLA_PYTHON_CLIENT_MEM_FRACTION": Setting(value=".97", reason="memory that JAX takes at once", source=SPEC),
    "TF_CPP_MIN_LOG_LEVEL": Setting(value="2", reason="XLA is quiet", source=SPEC),
}
AMD = {
    "HIP_FORCE_DEV_KERNARG": Setting(value="1", reason="arguments of kernels in device memory", source=SPEC),
    "HSA_FORCE_FINE_GRAIN_PCIE": Setting(value="1", reason="peer access over PCIe", source=SPEC),
    "NVTE_ALLOW_NONDETERMINISTIC_ALGO": Setting(value="1", reason="faster attention gradient", source=SPEC),
    "NVTE_USE_HIPBLASLT": Setting(value="1", reason="matrix products by hipBLASLt", source=SPEC),
    "NVTE_FUSED_ATTN": Setting(value="1", reason="fused attention", source=SPEC),
    "NVTE_FUSED_ATTN_CK": Setting(value="1", reason="attention by Composable Kernel", source=SPEC),
    "NVTE_FUSED_ATTN_AOTRITON": Setting(value="0", reason="attention by Composable Kernel", source=SPEC),
    "NVTE_CK_USES_FWD_V3": Setting(value="1", reason="the faster attention kernel", source=SPEC),
    "NVTE_CK_IS_V3_ATOMIC_FP32": Setting(value="0", reason="as its recipes have it", source=SPEC),
    "NVTE_CK_HOW_V3_BF16_CVT": Setting(value="2", reason="rounding to bf16", source=SPEC),
}


def list_settings(workload: JobWorkload, device: Profile | None) -> dict[str, Setting]:
    """Variables of JAX, and on AMD of Transformer Engine."""
    return {**EVERYWHERE, **(AMD if device is not None and device.vendor == "amd" else {})}
