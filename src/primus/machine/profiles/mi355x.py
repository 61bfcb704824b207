"""AMD Instinct MI355X: CDNA 4, cooled by liquid."""

from primus.machine.profile import MIB, Floor, Profile

PROFILES = (
    Profile(
        model="MI355X",
        vendor="amd",
        architecture="gfx950",
        source="AMD MI355X data sheet; memory: amd-smi 26.2 output; ids: ROCm/rocm-systems mi_gpu_spec.yaml",
        device_ids=(0x75A3, 0x75B3),
        compute_units=256,
        xcds=8,
        clock_mhz=2400,
        flop_per_clock={"fp32": 256, "bf16": 4096, "fp16": 4096, "fp8": 8192, "fp4": 16384},
        memory_bytes=294896 * MIB,
        memory_gb_per_s=8000,
        last_level_cache_bytes=256 * MIB,
        power_w=1400,
        pcie_gts=32,
        pcie_width=16,
        hive_size=8,
        server_sizes=(8,),
        fp8_format="e4m3fn",
        peaks={"fp32": 157.3, "bf16": 2516.6, "fp16": 2516.6, "fp8": 5033.2, "fp4": 10066.0},
        achieved={"bf16": 1565.0},
        floors={
            "gemm_bf16": Floor(value=956, unit="TFLOP/s", source="ROCm/ROCmValidationSuite gst"),
            "gemm_fp16": Floor(value=946, unit="TFLOP/s", source="ROCm/ROCmValidationSuite gst"),
            "memory_copy": Floor(value=5525.433, unit="GB/s", source="AMD-AGI/Primus-SaFE Bench preflight"),
            "memory_triad": Floor(value=5447.277, unit="GB/s", source="AMD-AGI/Primus-SaFE Bench preflight"),
            "all_reduce": Floor(value=350, unit="GB/s", source="AMD Instinct customer acceptance guide"),
            "all_reduce_64m": Floor(value=100, unit="GB/s", source="AMD-AGI/Primus node-smoke default"),
        },
    ),
)
