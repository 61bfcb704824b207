"""Settings of the kernels of a run."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct


class KernelSettings(Struct, frozen=True, kw_only=True):
    """How the kernels of a run are checked."""

    kernel_trial: Literal["auto", "always", "off"] = "auto"
    """Try the kernels against float64 before the first step, and stop if one is wrong; auto does so on a GPU."""
