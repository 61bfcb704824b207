"""NVIDIA H800: known by its ids, without confirmed figures."""

from primus.machine.profile import Profile

PROFILES = (
    Profile(
        model="H800",
        vendor="nvidia",
        architecture="sm90",
        source="pci.ids 2026.08.22; rates unconfirmed",
        device_ids=(0x2324, 0x2322),
        fp8_format="e4m3fn",
    ),
)
