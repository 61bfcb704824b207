"""AMD Instinct MI350X: CDNA 4, cooled by air."""

from primus.machine.profile import MIB, Floor, Profile

PROFILES = (
    Profile(
        model="MI350X",
        vendor="amd",
        architecture="gfx950",
        source="AMD MI350X data sheet; ids: ROCm/rocm-systems mi_gpu_spec.yaml",
        device_ids=(0x75A0, 0x75B0),
        compute_units=256,
        xcds=8,
        clock_mhz=2200,
        flop_per_clock={"fp32": 256, "bf16": 4096, "fp16": 4096, "fp8": 8192, "fp4": 16384},
        memory_bytes=294896 * MIB,
        memory_gb_per_s=8000,
        last_level_cache_bytes=256 * MIB,
        power_w=1000,
        pcie_gts=32,
        pcie_width=16,
        hive_size=8,
        server_sizes=(8,),
        fp8_format="e4m3fn",
        peaks={"fp32": 144.2, "bf16": 2306.9, "fp16": 2306.9, "fp8": 4613.7, "fp4": 9227.0},
        floors={
            "gemm_bf16": Floor(value=956, unit="TFLOP/s", source="ROCm/ROCmValidationSuite gst"),
            "gemm_fp16": Floor(value=946, unit="TFLOP/s", source="ROCm/ROCmValidationSuite gst"),
            "all_reduce": Floor(value=350, unit="GB/s", source="AMD Instinct customer acceptance guide"),
            "all_reduce_64m": Floor(value=100, unit="GB/s", source="AMD-AGI/Primus node-smoke default"),
        },
    ),
)
