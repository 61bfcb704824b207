"""Ampere: nothing beyond what every NVIDIA GPU gets."""

from primus.machine.profile import ProfileLayer

LAYER = ProfileLayer(
    name="sm80",
    parent="nvidia",
)
