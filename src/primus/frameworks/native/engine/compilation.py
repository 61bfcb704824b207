"""The decision whether a run's model is compiled."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Literal

from primus import patch
from primus.errors import UnfitError

QUOTING_PATCH = "inductor-library-paths"
"""Name of the patch for an installation of torch in a path with a space."""

COMPILE_S = 45.0
"""Time that torch.compile of model and loss takes: 32 and 45 s for 8 layers on two x86 cores, torch 2.13."""

SAVED_SHARE = 0.2
"""Minimum share of the eager time that it saves: 1.25 times faster on a CPU at a vocabulary of 2048 in fp32."""

MARGIN = 2.0
"""Ratio of saving to cost above which a run is compiled; both are estimates."""

EAGER_TFLOPS = {"cpu": 0.06, "cuda": 300.0}
"""Rate of one CPU thread (7 M parameters in fp32 on two x86 cores: 0.12), of one current GPU (8 B parameters)."""


@dataclass(frozen=True)
class CompileDecision:
    """Whether to compile, and why."""

    compiled: bool
    reason: str


def decide_compilation(
    asked: bool | Literal["auto"],
    *,
    before: bool | None,
    flops_per_device: float,
    device_type: str,
    threads: int,
    environ: Mapping[str, str],
) -> CompileDecision:
    """Decide whether a run is compiled. A resumed run does as before, because a compiled step rounds differently.

    Args:
        asked: The setting.
        before: Whether the run that wrote the checkpoint was compiled; None without a checkpoint.
        flops_per_device: FLOPs of the whole run, from its first step to its last, on one device.
        device_type: cpu or cuda.
        threads: Threads of a CPU process.
        environ: $CXX names the C++ compiler.

    Raises:
        UnfitError: `compile: true`, and this machine has no compiler.
    """
    rate = EAGER_TFLOPS[device_type] * 1e12 * (threads if device_type == "cpu" else 1)
    wanted = _decide_by_estimate(asked, before, flops_per_device / rate)
    if not wanted.compiled:
        return wanted
    missing = _find_missing_compiler(device_type, environ)
    if missing and asked is True:
        raise UnfitError(f"compile: true, but this machine has no {missing}", "install it, or set compile: auto")
    if missing:
        return CompileDecision(False, f"this machine has no {missing}")
    return wanted


def _decide_by_estimate(asked: bool | Literal["auto"], before: bool | None, eager_s: float) -> CompileDecision:
    if asked != "auto":
        return CompileDecision(asked, "as configured")
    if before is not None:
        return CompileDecision(before, "as in the checkpoint")
    saved_s = SAVED_SHARE * eager_s
    if saved_s > MARGIN * COMPILE_S:
        return CompileDecision(True, f"saves an estimated {saved_s / 60:.0f} of {eager_s / 60:.0f} min")
    return CompileDecision(
        False, f"estimated run of {max(eager_s / 60, 1):.0f} min is too short to amortize compilation"
    )


def _find_missing_compiler(device_type: str, environ: Mapping[str, str]) -> str:
    """Name the missing requirement of torch.compile; empty if nothing is missing.

    Inductor writes C++ for a CPU (`torch._inductor.config.cpp.cxx`: $CXX, else g++) and Triton for a GPU.
    """
    if device_type != "cpu":
        return "" if find_spec("triton") else "Triton"
    compiler = environ.get("CXX", "g++")
    if not shutil.which(compiler):
        return f"C++ compiler ({compiler})"
    torch = find_spec("torch")
    folder = torch.origin if torch and torch.origin else ""
    if " " not in folder or any(
        choice.name == QUOTING_PATCH and choice.applies for choice in patch.choose_patches(environ)
    ):
        return ""
    return f"torch in a folder without spaces, which Inductor needs ({folder})"
