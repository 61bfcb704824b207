"""NVIDIA H20: known by its ids, without confirmed figures."""

from primus.machine.profile import Profile

PROFILES = (
    Profile(
        model="H20",
        vendor="nvidia",
        architecture="sm90",
        source="pci.ids 2026.08.22; rates unconfirmed",
        device_ids=(0x2329, 0x232C),
        fp8_format="e4m3fn",
    ),
)
