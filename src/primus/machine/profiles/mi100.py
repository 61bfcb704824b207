"""AMD Instinct MI100: CDNA, whose bf16 runs at half the rate of fp16."""

from primus.machine.profile import MIB, Profile

PROFILES = (
    Profile(
        model="MI100",
        vendor="amd",
        architecture="gfx908",
        source="AMD MI100 data sheet; memory: nominal less 16 MiB, as AMD's drivers show it on other models; cache: "
        "ROCm documentation, GPU specifications; hives: RCCL tools/topo_expl/models; ids: pci.ids 2026.08.22",
        device_ids=(0x738C, 0x738E),
        compute_units=120,
        clock_mhz=1502,
        flop_per_clock={"fp32": 128, "bf16": 512, "fp16": 1024},
        memory_bytes=32752 * MIB,
        memory_gb_per_s=1228.8,
        last_level_cache_bytes=8 * MIB,
        power_w=300,
        pcie_gts=16,
        pcie_width=16,
        hive_size=4,
        link_layout="bridge",
        peaks={"fp32": 23.1, "bf16": 92.3, "fp16": 184.6},
    ),
)
