"""AMD Instinct MI210: one die of CDNA 2 on a PCIe card."""

from primus.machine.profile import MIB, Floor, Profile

PROFILES = (
    Profile(
        model="MI210",
        vendor="amd",
        architecture="gfx90a",
        source="AMD MI210 data sheet; memory: ROCm/device-metrics-exporter test data; cache: ROCm documentation, "
        "GPU specifications; ids: pci.ids 2026.08.22",
        device_ids=(0x740F,),
        compute_units=104,
        clock_mhz=1700,
        flop_per_clock={"fp32": 128, "bf16": 1024, "fp16": 1024},
        memory_bytes=65520 * MIB,
        memory_gb_per_s=1638,
        last_level_cache_bytes=8 * MIB,
        power_w=300,
        pcie_gts=16,
        pcie_width=16,
        hive_size=4,
        link_layout="bridge",
        peaks={"fp32": 22.6, "bf16": 181.0, "fp16": 181.0},
        floors={"gemm_fp16": Floor(value=150, unit="TFLOP/s", source="ROCm/ROCmValidationSuite gst")},
    ),
)
