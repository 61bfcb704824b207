"""Environment variables that a job's backend needs for its parallel layout.

A file of `machine/frameworks` with a backend's name lists the libraries that the backend uses, which enables their
settings in the machine's layers, and returns the variables that depend on the layout.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from primus import registry
from primus.contract import PlugInKind
from primus.machine.profile import Library, Profile, Setting
from primus.machine.workload import JobWorkload


class Framework(Protocol):
    """Environment variables of a backend: `frameworks/NAME.py`, used with `framework: NAME`.

    The file is imported on every node before the workers start; it must not import tensor libraries.
    """

    @property
    def LIBRARIES(self) -> tuple[Library, ...]:
        """Libraries that the backend computes with."""
        ...

    def list_settings(self, workload: JobWorkload, device: Profile | None, /) -> Mapping[str, Setting]:
        """Variables by the layout of a job, on devices of a model; None where the model is not known."""
        ...


FRAMEWORKS = PlugInKind[Framework]("frameworks", Framework)


def find_framework(name: str) -> Framework | None:
    """The plug-in of the backend `name`; None without one."""
    if not registry.has_plug_in("frameworks", name):
        return None
    return registry.load_plug_in(FRAMEWORKS, name)
