"""NVIDIA GH200: an H100's cores beside a Grace CPU; the name alone means 96 GB of HBM3."""

from primus.machine.profile import MIB, Floor, Profile

PROFILES = (
    Profile(
        model="GH200",
        vendor="nvidia",
        architecture="sm90",
        source="stas00/ml-engineering, accelerators; ids: pci.ids 2026.08.22",
        device_ids=(0x2342,),
        names=("GH200 120GB", "GH200 480GB"),
        compute_units=132,
        memory_gb_per_s=4000,
        last_level_cache_bytes=50 * MIB,
        server_sizes=(1, 2, 4),
        fp8_format="e4m3fn",
        peaks={"fp32": 67, "tf32": 494.7, "bf16": 989.4, "fp16": 989.4, "fp8": 1979},
        achieved={"bf16": 828.6, "fp8": 1535},
        floors={
            "gemm_bf16": Floor(value=663, unit="TFLOP/s", source="80 % of the best in stas00/ml-engineering"),
        },
    ),
    Profile(
        model="GH200 144GB",
        vendor="nvidia",
        architecture="sm90",
        source="stas00/ml-engineering, accelerators; ids: pci.ids 2026.08.22",
        device_ids=(0x2348,),
        names=("GH200 144G HBM3e", "GH200 144G"),
        compute_units=132,
        memory_gb_per_s=4800,
        last_level_cache_bytes=50 * MIB,
        server_sizes=(1, 2, 4),
        fp8_format="e4m3fn",
        peaks={"fp32": 67, "tf32": 494.7, "bf16": 989.4, "fp16": 989.4, "fp8": 1979},
    ),
)
