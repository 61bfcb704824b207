"""NVIDIA GB200: the figures of one of its GPUs."""

from primus.machine.profile import Floor, Profile

PROFILES = (
    Profile(
        model="GB200",
        vendor="nvidia",
        architecture="sm100",
        source="glennklockwood.com/garden/processors (vendor's figures, dense); NVL72; ids: pci.ids 2026.08.22",
        device_ids=(0x2941,),
        memory_gb_per_s=8000,
        last_level_cache_bytes=126_000_000,
        power_w=1200,
        hive_size=72,
        server_sizes=(2, 4),
        fp8_format="e4m3fn",
        peaks={"tf32": 1250, "bf16": 2500, "fp16": 2500, "fp8": 5000, "fp4": 10000},
        achieved={"bf16": 1822, "fp8": 3615},
        floors={
            "gemm_bf16": Floor(value=1458, unit="TFLOP/s", source="80 % of the best in stas00/ml-engineering"),
            "gemm_fp8": Floor(value=2892, unit="TFLOP/s", source="80 % of the best in stas00/ml-engineering"),
        },
    ),
)
