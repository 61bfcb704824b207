"""NVIDIA B200 on an HGX board."""

from primus.machine.profile import MIB, Floor, Profile

PROFILES = (
    Profile(
        model="B200",
        vendor="nvidia",
        architecture="sm100",
        source="glennklockwood.com/garden/processors (vendor's figures, dense); fp32 and tf32: NVIDIA HGX B200 data "
        "sheet, an eighth, halved where it counts sparsity; ids: pci.ids 2026.08.22",
        device_ids=(0x2901,),
        compute_units=148,
        memory_bytes=183359 * MIB,
        memory_gb_per_s=8000,
        last_level_cache_bytes=126_000_000,
        power_w=1000,
        pcie_gts=32,
        pcie_width=16,
        hive_size=8,
        server_sizes=(8,),
        fp8_format="e4m3fn",
        peaks={"fp32": 75, "tf32": 1125, "bf16": 2250, "fp16": 2250, "fp8": 4500, "fp4": 9000},
        achieved={"bf16": 1745, "fp8": 3432},
        floors={
            "gemm_bf16": Floor(value=1396, unit="TFLOP/s", source="80 % of the best in stas00/ml-engineering"),
            "all_reduce": Floor(value=545, unit="GB/s", source="80 % of the best in stas00/ml-engineering"),
        },
    ),
)
