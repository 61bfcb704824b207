"""NVIDIA GB200: the figures of one of its GPUs."""

from primus.machine.profile import Floor, Profile, Setting

PROFILES = (
    Profile(
        model="GB200",
        vendor="nvidia",
        architecture="sm100",
        source="glennklockwood.com/garden/processors (vendor's figures, dense); NVL72; ids: pci.ids 2026.08.22",
        device_ids=(0x2941,),
        memory_gb_per_s=8000,
        last_level_cache_bytes=126_000_000,
        power_w=1200,
        hive_size=72,
        server_sizes=(2, 4),
        fp8_format="e4m3fn",
        peaks={"tf32": 1250, "bf16": 2500, "fp16": 2500, "fp8": 5000, "fp4": 10000},
        achieved={"bf16": 1822, "fp8": 3615},
        floors={
            "gemm_bf16": Floor(value=1458, unit="TFLOP/s", source="80 % of the best in stas00/ml-engineering"),
        },
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
