"""NVIDIA A100: four cards; the name alone means the SXM module with 80 GB."""

from primus.machine.profile import MIB, Floor, Profile

SOURCE = (
    "NVIDIA A100 data sheet, halved where it counts sparsity; memory: nvidia-smi output in modal-labs/modal-client#2797"
    " (less with older drivers); ids: pci.ids 2026.08.22"
)

PROFILES = (
    Profile(
        model="A100",
        vendor="nvidia",
        architecture="sm80",
        source=SOURCE,
        device_ids=(0x20B2,),
        names=("A100 SXM4 80GB", "A100 SXM 80GB"),
        memory_bytes=81920 * MIB,
        memory_gb_per_s=2039,
        power_w=400,
        hive_size=8,
        server_sizes=(4, 8),
        compute_units=108,
        last_level_cache_bytes=40 * MIB,
        pcie_gts=16,
        pcie_width=16,
        peaks={"fp32": 19.5, "tf32": 156, "bf16": 312, "fp16": 312},
        achieved={"bf16": 271},
        floors={
            "gemm_bf16": Floor(value=217, unit="TFLOP/s", source="80 % of the best in stas00/ml-engineering"),
            "all_reduce": Floor(value=187, unit="GB/s", source="80 % of the best in stas00/ml-engineering"),
        },
    ),
    Profile(
        model="A100 40GB",
        vendor="nvidia",
        architecture="sm80",
        source=SOURCE,
        device_ids=(0x20B0,),
        names=("A100 SXM4 40GB", "A100 SXM 40GB"),
        memory_bytes=40960 * MIB,
        memory_gb_per_s=1555,
        power_w=400,
        hive_size=8,
        server_sizes=(4, 8, 16),
        compute_units=108,
        last_level_cache_bytes=40 * MIB,
        pcie_gts=16,
        pcie_width=16,
        peaks={"fp32": 19.5, "tf32": 156, "bf16": 312, "fp16": 312},
    ),
    Profile(
        model="A100 PCIe",
        vendor="nvidia",
        architecture="sm80",
        source=SOURCE,
        device_ids=(0x20B5,),
        names=("A100 80GB PCIe", "A100 PCIe 80GB"),
        memory_bytes=81920 * MIB,
        memory_gb_per_s=1935,
        power_w=300,
        compute_units=108,
        last_level_cache_bytes=40 * MIB,
        pcie_gts=16,
        pcie_width=16,
        peaks={"fp32": 19.5, "tf32": 156, "bf16": 312, "fp16": 312},
    ),
    Profile(
        model="A100 PCIe 40GB",
        vendor="nvidia",
        architecture="sm80",
        source=SOURCE,
        device_ids=(0x20B1, 0x20F1),
        memory_bytes=40960 * MIB,
        memory_gb_per_s=1555,
        power_w=250,
        compute_units=108,
        last_level_cache_bytes=40 * MIB,
        pcie_gts=16,
        pcie_width=16,
        peaks={"fp32": 19.5, "tf32": 156, "bf16": 312, "fp16": 312},
    ),
)
