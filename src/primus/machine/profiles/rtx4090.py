"""NVIDIA GeForce RTX 4090; its slower namesakes are known by name only."""

from primus.machine.profile import Profile

PROFILES = (
    Profile(
        model="RTX 4090",
        vendor="nvidia",
        architecture="sm89",
        source="NVIDIA Ada white paper, sums in fp32; ids: pci.ids 2026.08.22",
        device_ids=(0x2684,),
        compute_units=128,
        memory_gb_per_s=1008,
        power_w=450,
        pcie_gts=16,
        pcie_width=16,
        fp8_format="e4m3fn",
        peaks={"fp32": 82.6, "tf32": 82.6, "bf16": 165.2, "fp16": 165.2, "fp8": 330.3},
    ),
    Profile(
        model="RTX 4090 D",
        vendor="nvidia",
        architecture="sm89",
        source="its own figures are not at hand",
        fp8_format="e4m3fn",
    ),
    Profile(
        model="RTX 4090 Laptop GPU",
        vendor="nvidia",
        architecture="sm89",
        source="its own figures are not at hand",
        fp8_format="e4m3fn",
    ),
)
