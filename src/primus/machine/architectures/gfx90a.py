"""CDNA 2: no fp8, and attention kernels of an earlier generation."""

from primus.machine.profile import ProfileLayer, Setting

LAUNCHER = "AMD-AGI/Primus MI250X profile, 2025"

LAYER = ProfileLayer(
    name="gfx90a",
    parent="amd",
    settings={
        "HSA_XNACK": Setting(value="0", reason="no page faults in GPU kernels, which cost speed", source=LAUNCHER),
        "GPU_MAX_HEAP_SIZE": Setting(
            value="90", reason="per cent of the memory that a process may use", source=LAUNCHER
        ),
        "NVTE_USE_CAST_TRANSPOSE_TRITON": Setting(
            value="0",
            reason="the compiled kernel does it",
            source=LAUNCHER,
            when="transformer engine",
        ),
        "NVTE_USE_OPTIMIZED_HIPIFIED_CAST_TRANSPOSE": Setting(
            value="1",
            reason="Transformer Engine's compiled cast and transpose",
            source=LAUNCHER,
            when="transformer engine",
        ),
        "NVTE_ROCM_ENABLE_MXFP8": Setting(
            value=None,
            reason="no fp8 in hardware",
            source=LAUNCHER,
            when="transformer engine",
        ),
        "NVTE_CK_USES_BWD_V3": Setting(
            value="0",
            reason="the faster attention gradient is for CDNA 3 and later",
            source=LAUNCHER,
            when="transformer engine",
        ),
        "RCCL_MSCCLPP_THRESHOLD": Setting(
            value="536870912", reason="bytes up to which MSCCL++ would serve, were it on", source=LAUNCHER
        ),
    },
)
