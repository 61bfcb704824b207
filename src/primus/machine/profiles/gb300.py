"""NVIDIA GB300: the figures of one of its GPUs."""

from primus.machine.profile import Profile, Setting

PROFILES = (
    Profile(
        model="GB300",
        vendor="nvidia",
        architecture="sm103",
        source="stas00/ml-engineering, accelerators; NVL72; ids: pci.ids 2026.08.22",
        device_ids=(0x31C2, 0x31C3),
        memory_gb_per_s=8000,
        last_level_cache_bytes=126_000_000,
        power_w=1400,
        hive_size=72,
        server_sizes=(4,),
        fp8_format="e4m3fn",
        peaks={"fp32": 80, "tf32": 1250, "bf16": 2500, "fp16": 2500, "fp8": 5000, "fp4": 15000},
        settings={
            "NCCL_MNNVL_ENABLE": Setting(
                value="1",
                reason="nodes of one rack reach each other over NVLink; an error where that is down, not slow NICs",
                source="AMD-AGI/Primus benchmark/kernel/rccl/run_benchmark_gb200.sh; NCCL user guide",
                when="several nodes",
            ),
            "NCCL_CUMEM_ENABLE": Setting(
                value="1",
                reason="NVLink between nodes needs memory of the driver's virtual memory calls",
                source="NCCL user guide",
                when="several nodes",
            ),
        },
    ),
)
