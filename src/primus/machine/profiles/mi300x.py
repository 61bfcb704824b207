"""AMD Instinct MI300X: CDNA 3, 192 GiB."""

from primus.machine.profile import MIB, Floor, Profile

ACCEPTANCE = "AMD Instinct customer acceptance guide"

PROFILES = (
    Profile(
        model="MI300X",
        vendor="amd",
        architecture="gfx942",
        source="AMD MI300X data sheet; ROCm/k8s-device-plugin test data (memory); ROCm/rocm-systems mi_gpu_spec.yaml",
        device_ids=(0x74A1, 0x74B5, 0x74A9, 0x74BD),
        compute_units=304,
        xcds=8,
        clock_mhz=2100,
        flop_per_clock={"fp32": 256, "tf32": 1024, "bf16": 2048, "fp16": 2048, "fp8": 4096},
        memory_bytes=196592 * MIB,
        memory_gb_per_s=5300,
        last_level_cache_bytes=256 * MIB,
        power_w=750,
        pcie_gts=32,
        pcie_width=16,
        hive_size=8,
        server_sizes=(8,),
        fp8_format="e4m3fnuz",
        peaks={"fp32": 163.4, "tf32": 653.7, "bf16": 1307.4, "fp16": 1307.4, "fp8": 2614.9},
        achieved={"bf16": 668.4},
        floors={
            "gemm_bf16": Floor(value=534, unit="TFLOP/s", source="80 % of the best in stas00/ml-engineering"),
            "gemm_fp16": Floor(value=523, unit="TFLOP/s", source="ROCm/ROCmValidationSuite gst"),
            "gemm_fp32": Floor(value=100, unit="TFLOP/s", source="ROCm/ROCmValidationSuite gst"),
            "memory_copy": Floor(value=4177.285, unit="GB/s", source=ACCEPTANCE),
            "memory_triad": Floor(value=3885.301, unit="GB/s", source=ACCEPTANCE),
            "host_to_device": Floor(value=44.5, unit="GB/s", source="80 % of what AMD's acceptance tests show"),
            "all_reduce": Floor(value=304, unit="GB/s", source=ACCEPTANCE),
            "all_reduce_64m": Floor(value=100, unit="GB/s", source="AMD-AGI/Primus node-smoke default"),
        },
    ),
)
