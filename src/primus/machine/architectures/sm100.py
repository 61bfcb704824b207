"""Blackwell: nothing beyond what every NVIDIA GPU gets."""

from primus.machine.profile import ProfileLayer

LAYER = ProfileLayer(
    name="sm100",
    parent="nvidia",
)
