"""AMD Instinct MI300A: CDNA 3 with CPU cores in one package and one memory."""

from primus.machine.profile import MIB, Profile, Setting

LAUNCHER = "AMD-AGI/Primus runner GPU files, 2025"

PROFILES = (
    Profile(
        model="MI300A",
        vendor="amd",
        architecture="gfx942",
        source="AMD MI300A data sheet (bandwidth, where AMD-AGI/Primus projects with 4000 GB/s); links: RCCL "
        "tools/topo_expl; cache: ROCm documentation, GPU specifications; ids: ROCm/rocm-systems mi_gpu_spec.yaml",
        device_ids=(0x74A0, 0x74B4),
        compute_units=228,
        xcds=6,
        clock_mhz=2100,
        flop_per_clock={"fp32": 256, "tf32": 1024, "bf16": 2048, "fp16": 2048, "fp8": 4096},
        memory_gb_per_s=5300,
        last_level_cache_bytes=256 * MIB,
        power_w=550,
        hive_size=4,
        server_sizes=(4,),
        fp8_format="e4m3fnuz",
        peaks={"fp32": 122.6, "tf32": 490.3, "bf16": 980.6, "fp16": 980.6, "fp8": 1961.0},
        settings={
            "HSA_XNACK": Setting(
                value="1",
                reason="page faults let the GPU use what the CPU allocated in the memory they share",
                source=LAUNCHER,
            ),
            "HSA_ENABLE_INTERRUPT": Setting(
                value="1", reason="wait for an interrupt; polling takes cores of the same package", source=LAUNCHER
            ),
            "HSA_NO_SCRATCH_RECLAIM": Setting(
                value="0", reason="give scratch memory back, which is shared with the CPU", source=LAUNCHER
            ),
            "GPU_MAX_HEAP_SIZE": Setting(
                value="100", reason="per cent of the memory that a process may use", source=LAUNCHER
            ),
            "NVTE_CK_USES_BWD_V3": Setting(
                value="0",
                reason="as the existing launcher has it; its reason is not public",
                source=LAUNCHER,
                when="transformer engine",
            ),
        },
    ),
)
