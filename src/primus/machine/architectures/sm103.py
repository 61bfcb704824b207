"""Blackwell Ultra: as Blackwell."""

from primus.machine.profile import ProfileLayer

LAYER = ProfileLayer(
    name="sm103",
    parent="sm100",
)
