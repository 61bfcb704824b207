"""CDNA 4."""

from primus.machine.profile import ProfileLayer, Setting

LAYER = ProfileLayer(
    name="gfx950",
    parent="amd",
    settings={
        "RCCL_WARP_SPEED_AUTO": Setting(value="0", reason="else the loss becomes NaN", source="AMD-AGI/Primus#1178"),
    },
)
