"""CDNA: no fp8, and attention kernels of an earlier generation."""

from primus.machine.profile import ProfileLayer, Setting

LAUNCHER = "AMD-AGI/Primus MI250X profile, 2025"

LAYER = ProfileLayer(
    name="gfx908",
    parent="amd",
    settings={
        "NVTE_ROCM_ENABLE_MXFP8": Setting(
            value=None,
            reason="no fp8 in hardware",
            source="AMD MI100 data sheet",
            when="transformer engine",
        ),
        "NVTE_CK_USES_BWD_V3": Setting(
            value="0",
            reason="the faster attention gradient is for CDNA 3 and later",
            source=LAUNCHER,
            when="transformer engine",
        ),
    },
)
