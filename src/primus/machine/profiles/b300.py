"""NVIDIA B300 on an HGX board; sources give 12.6 to 15 PFLOP/s of fp4, and disagree on power."""

from primus.machine.profile import Floor, Profile

PROFILES = (
    Profile(
        model="B300",
        vendor="nvidia",
        architecture="sm103",
        source="glennklockwood.com/garden/processors (vendor's figures, dense); ids: pci.ids 2026.08.22",
        device_ids=(0x3182,),
        memory_gb_per_s=8000,
        last_level_cache_bytes=126_000_000,
        hive_size=8,
        server_sizes=(8,),
        fp8_format="e4m3fn",
        peaks={"fp32": 75, "tf32": 1125, "bf16": 2250, "fp16": 2250, "fp8": 4500, "fp4": 13125},
        achieved={"bf16": 1769, "fp8": 3353},
        floors={
            "gemm_bf16": Floor(value=1415, unit="TFLOP/s", source="80 % of the best in stas00/ml-engineering"),
        },
    ),
)
