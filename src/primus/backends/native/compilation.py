"""Whether a run's model is compiled."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Literal

COMPILE_S = {"cpu": 60.0, "cuda": 60.0}
"""Time that torch.compile of model and loss takes: 30 to 45 s for 8 layers on two busy x86 cores with torch 2.13."""

EAGER_TFLOPS = {"cpu": 0.1, "cuda": 300.0}
"""Rate at which an eager run is assumed to compute: 7 M parameters on two x86 cores; a large model on a current GPU."""

SAVED_SHARE = 0.15
"""Share of the eager time that compiling saves, at the least: 1.2 times faster on the CPU at a small vocabulary."""


@dataclass(frozen=True)
class Decision:
    """Whether to compile, and why."""

    compiled: bool
    reason: str


def decide(
    asked: bool | Literal["auto"],
    *,
    before: bool | None,
    flops_per_device: float,
    device_type: str,
    environ: Mapping[str, str],
) -> Decision:
    """Whether a run is compiled; a run that continues does as before, since a compiled step rounds otherwise.

    Args:
        asked: The setting.
        before: What the checkpoint says that the run continues from; None where there is none.
        flops_per_device: FLOPs of the whole run, from its first step to its last, on one device.
        device_type: cpu or cuda.
        environ: Tells the C++ compiler.
    """
    wanted = _wanted(asked, before, flops_per_device, device_type)
    if not wanted.compiled:
        return wanted
    missing = _missing_compiler(device_type, environ)
    if missing:
        return Decision(False, f"there is no {missing}, so nothing is compiled")
    return wanted


def _wanted(
    asked: bool | Literal["auto"], before: bool | None, flops_per_device: float, device_type: str
) -> Decision:
    if asked != "auto":
        return Decision(asked, "as configured")
    if before is not None:
        return Decision(before, "as before")
    eager_s = flops_per_device / (EAGER_TFLOPS[device_type] * 1e12)
    saved_s = SAVED_SHARE * eager_s
    if saved_s > COMPILE_S[device_type]:
        return Decision(True, f"saves about {saved_s / 60:.0f} min of {eager_s / 60:.0f}")
    return Decision(False, f"the run is too short for it, about {max(eager_s / 60, 1):.0f} min")


def _missing_compiler(device_type: str, environ: Mapping[str, str]) -> str:
    """What torch.compile needs and this machine lacks; empty where it lacks nothing.

    Inductor writes C++ for a CPU (`torch._inductor.config.cpp.cxx`: $CXX, else g++) and Triton for a GPU.
    """
    if device_type != "cpu":
        return "" if find_spec("triton") else "Triton"
    compiler = environ.get("CXX", "g++")
    return "" if shutil.which(compiler) else f"C++ compiler ({compiler})"
