"""Blackwell Ultra: as Blackwell."""

from primus.machine.profile import Layer

LAYER = Layer(
    name="sm103",
    parent="sm100",
)
