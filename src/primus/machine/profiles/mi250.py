"""AMD Instinct MI250: two dies of CDNA 2, each of which is a device with half of the figures."""

from primus.machine.profile import MIB, Profile

PROFILES = (
    Profile(
        model="MI250",
        vendor="amd",
        architecture="gfx90a",
        source="AMD MI250 data sheet; memory: that of two MI210; cache: ROCm documentation, GPU specifications; "
        "cards of a server: ROCm MI250 microarchitecture, RCCL tools/topo_expl (boards give a die 8 or 16 lanes); ids: "
        "pci.ids 2026.08.22",
        device_ids=(0x740C,),
        compute_units=208,
        xcds=2,
        devices_per_card=2,
        clock_mhz=1700,
        flop_per_clock={"fp32": 128, "bf16": 1024, "fp16": 1024},
        memory_bytes=2 * 65520 * MIB,
        memory_gb_per_s=3277,
        last_level_cache_bytes=2 * 8 * MIB,
        power_w=500,
        pcie_gts=16,
        hive_size=4,
        link_layout="partial",
        server_sizes=(4, 8),
        peaks={"fp32": 45.3, "bf16": 362.1, "fp16": 362.1},
    ),
)
