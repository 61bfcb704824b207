"""The architecture after CDNA 4, whose figures are not known."""

from primus.machine.profile import ProfileLayer, Setting

LAYER = ProfileLayer(
    name="gfx1250",
    parent="amd",
    settings={
        "AMD_SERIALIZE_COPY": Setting(value="0", reason="3 costs 38 % of the speed", source="AMD-AGI/Primus#1043"),
    },
)
