"""NVIDIA A800: known by its ids, without figures."""

from primus.machine.profile import Profile

PROFILES = (
    Profile(
        model="A800",
        vendor="nvidia",
        architecture="sm80",
        source="pci.ids 2026.08.22; no data sheet at hand",
        device_ids=(0x20BD, 0x20F3),
    ),
)
