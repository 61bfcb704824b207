"""Hopper: nothing beyond what every NVIDIA GPU gets."""

from primus.machine.profile import Layer

LAYER = Layer(
    name="sm90",
    parent="nvidia",
)
