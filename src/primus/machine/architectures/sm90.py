"""Hopper: nothing beyond what every NVIDIA GPU gets."""

from primus.machine.profile import ProfileLayer

LAYER = ProfileLayer(
    name="sm90",
    parent="nvidia",
)
