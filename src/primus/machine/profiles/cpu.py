"""A machine without accelerators."""

from primus.machine.profile import Profile

PROFILES = (Profile(model="CPU", vendor="cpu", architecture="base", source="what every machine gets is enough"),)
