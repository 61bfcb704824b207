"""NVIDIA H200: the name alone means the SXM module."""

from primus.machine.profile import MIB, Floor, Profile

PROFILES = (
    Profile(
        model="H200",
        vendor="nvidia",
        architecture="sm90",
        source="NVIDIA H200 data sheet, halved where it counts sparsity; ids: pci.ids 2026.08.22",
        device_ids=(0x2335,),
        compute_units=132,
        memory_bytes=143771 * MIB,
        memory_gb_per_s=4800,
        last_level_cache_bytes=50 * MIB,
        power_w=700,
        pcie_gts=32,
        pcie_width=16,
        hive_size=8,
        server_sizes=(4, 8),
        fp8_format="e4m3fn",
        peaks={"fp32": 67, "tf32": 494.7, "bf16": 989.4, "fp16": 989.4, "fp8": 1979},
        achieved={"fp8": 1453},
        floors={
            "all_reduce": Floor(value=293, unit="GB/s", source="80 % of the best in stas00/ml-engineering"),
        },
    ),
    Profile(
        model="H200 NVL",
        vendor="nvidia",
        architecture="sm90",
        source="NVIDIA H200 data sheet, NVL, halved where it counts sparsity; ids: pci.ids 2026.08.22",
        device_ids=(0x233B,),
        memory_bytes=143771 * MIB,
        memory_gb_per_s=4800,
        last_level_cache_bytes=50 * MIB,
        power_w=600,
        pcie_gts=32,
        pcie_width=16,
        hive_size=4,
        link_layout="bridge",
        fp8_format="e4m3fn",
        peaks={"fp32": 60, "tf32": 417.5, "bf16": 835.5, "fp16": 835.5, "fp8": 1671},
    ),
)
