"""AMD Instinct MI325X: MI300X with 256 GiB."""

from primus.machine.profile import MIB, Floor, Profile

PROFILES = (
    Profile(
        model="MI325X",
        vendor="amd",
        architecture="gfx942",
        source="AMD MI325X data sheet; ids: ROCm/rocm-systems mi_gpu_spec.yaml",
        device_ids=(0x74A5, 0x74B9),
        compute_units=304,
        xcds=8,
        clock_mhz=2100,
        flop_per_clock={"fp32": 256, "tf32": 1024, "bf16": 2048, "fp16": 2048, "fp8": 4096},
        memory_bytes=262128 * MIB,
        memory_gb_per_s=6000,
        last_level_cache_bytes=256 * MIB,
        power_w=1000,
        pcie_gts=32,
        pcie_width=16,
        hive_size=8,
        server_sizes=(8,),
        fp8_format="e4m3fnuz",
        peaks={"fp32": 163.4, "tf32": 653.7, "bf16": 1307.4, "fp16": 1307.4, "fp8": 2614.9},
        achieved={"bf16": 784.9},
        floors={
            "gemm_bf16": Floor(value=554, unit="TFLOP/s", source="ROCm/ROCmValidationSuite gst"),
            "gemm_fp16": Floor(value=524, unit="TFLOP/s", source="ROCm/ROCmValidationSuite gst"),
            "memory_copy": Floor(value=3488, unit="GB/s", source="80 % of the least in AMD-AGI/Primus#712"),
            "all_reduce_64m": Floor(value=100, unit="GB/s", source="AMD-AGI/Primus node-smoke default"),
        },
    ),
)
