"""AMD Instinct MI250X: two dies of CDNA 2, each of which is a device with half of the figures."""

from primus.machine.profile import MIB, Profile

PROFILES = (
    Profile(
        model="MI250X",
        vendor="amd",
        architecture="gfx90a",
        source="AMD MI250X data sheet; memory: that of two MI210; cache: ROCm documentation, GPU specifications; "
        "cards of a server: OLCF Frontier user guide; ids: pci.ids 2026.08.22",
        device_ids=(0x7408,),
        compute_units=220,
        xcds=2,
        devices_per_card=2,
        clock_mhz=1700,
        flop_per_clock={"fp32": 128, "bf16": 1024, "fp16": 1024},
        memory_bytes=2 * 65520 * MIB,
        memory_gb_per_s=3277,
        last_level_cache_bytes=2 * 8 * MIB,
        power_w=500,
        hive_size=4,
        link_layout="partial",
        server_sizes=(4,),
        peaks={"fp32": 47.9, "bf16": 383.0, "fp16": 383.0},
    ),
)
