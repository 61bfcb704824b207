"""CDNA 3: nothing beyond what every AMD GPU gets."""

from primus.machine.profile import Layer

LAYER = Layer(
    name="gfx942",
    parent="amd",
)
