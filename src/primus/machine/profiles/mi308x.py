"""AMD Instinct MI308X: CDNA 3 with 80 compute units, which tools call AMD Radeon Graphics."""

from primus.machine.profile import MIB, Floor, Profile

PROFILES = (
    Profile(
        model="MI308X",
        vendor="amd",
        architecture="gfx942",
        source="ROCm/k8s-device-plugin test data (units, clock, memory); bandwidth as MI300X, unconfirmed",
        device_ids=(0x74A2, 0x74B6, 0x74A8, 0x74BC),
        compute_units=80,
        xcds=4,
        clock_mhz=1420,
        flop_per_clock={"fp32": 256, "tf32": 1024, "bf16": 2048, "fp16": 2048, "fp8": 4096},
        memory_bytes=196592 * MIB,
        memory_gb_per_s=5300,
        hive_size=8,
        server_sizes=(8,),
        fp8_format="e4m3fnuz",
        peaks={"fp32": 29.1, "tf32": 116.3, "bf16": 232.7, "fp16": 232.7, "fp8": 465.3},
        floors={
            "gemm_bf16": Floor(value=172, unit="TFLOP/s", source="ROCm/ROCmValidationSuite gst"),
            "gemm_fp16": Floor(value=172, unit="TFLOP/s", source="ROCm/ROCmValidationSuite gst"),
            "gemm_fp32": Floor(value=26, unit="TFLOP/s", source="ROCm/ROCmValidationSuite gst"),
        },
    ),
)
