"""NVIDIA L40S."""

from primus.machine.profile import MIB, Profile

PROFILES = (
    Profile(
        model="L40S",
        vendor="nvidia",
        architecture="sm89",
        source="NVIDIA L40S data sheet, halved where it counts sparsity; ids: pci.ids 2026.08.22",
        device_ids=(0x26B9,),
        memory_bytes=46068 * MIB,
        memory_gb_per_s=864,
        power_w=350,
        pcie_gts=16,
        pcie_width=16,
        fp8_format="e4m3fn",
        peaks={"fp32": 91.6, "tf32": 183, "bf16": 362, "fp16": 362, "fp8": 733},
    ),
)
