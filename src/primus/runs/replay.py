"""What differs between the machine that a run was made on and this one."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from msgspec import Struct

from primus.runs.files import read_json
from primus.runs.snapshot import SystemInfo, packages, system_info
from primus.runs.store import Run
from primus.secret import MASK

NUMERIC_PACKAGES = ("torch", "numpy", "tokenizers", "primus")
"""Packages whose version may change a loss."""

NUMERIC_VARIABLES = re.compile(
    r"(OMP|MKL|OPENBLAS|ONEDNN|DNNL|NCCL|RCCL|TORCH|PYTORCH|CUDA|CUBLAS|CUDNN|HIP|HSA|ROCM|ROCBLAS|HIPBLASLT|NVTE|ATEN)_\w+"
)
"""Variables of the shell that may change a loss, or which devices are used."""


class Difference(Struct, frozen=True):
    """One thing that is not as it was."""

    what: str
    then: str
    now: str
    changes_numbers: bool
    """Whether it may change a loss."""

    def __str__(self) -> str:
        return f"{self.what}: {self.then} then, {self.now} now{'' if self.changes_numbers else ' (changes no numbers)'}"


def differences(run: Run) -> list[Difference]:
    """All differences between the machine of `run` and this one, those that may change numbers first.

    Raises:
        PrimusError: The run has no snapshot.
    """
    then = read_json(run.directory / "env" / "system_info.json", SystemInfo)
    now = system_info()
    found = [
        Difference("devices", _listed(then.devices), _listed(now.devices), True) if then.devices != now.devices else None,
        Difference("processor", then.cpu_model, now.cpu_model, True) if then.cpu_model != now.cpu_model else None,
        Difference("cores", str(then.cpu_cores), str(now.cpu_cores), True) if then.cpu_cores != now.cpu_cores else None,
        Difference("python", then.python, now.python, False) if then.python != now.python else None,
        Difference("kernel", then.kernel, now.kernel, False) if then.kernel != now.kernel else None,
        Difference("host", then.host, now.host, False) if then.host != now.host else None,
    ]
    all_found = [difference for difference in found if difference] + _package_differences(run)
    return sorted(all_found, key=lambda difference: not difference.changes_numbers)


def variables(run: Run, environ: Mapping[str, str]) -> dict[str, str]:
    """Variables to set so that workers see what those of `run` saw: what the run set, and what may change numbers.

    Secrets are not among them; they come from today's environment.
    """
    wanted: dict[str, str] = {}
    for line in (run.directory / "env" / "primus_env_dump.txt").read_text(encoding="utf-8", errors="replace").split("\n"):
        assignment, _, source = line.rpartition("  # ")
        name, equals, value = assignment.partition("=")
        was_set = source not in ("shell", "terminal") and not source.startswith("direct")
        if equals and (was_set or NUMERIC_VARIABLES.fullmatch(name)) and MASK not in value:
            wanted[name] = value
    return {name: value for name, value in wanted.items() if environ.get(name) != value}


def _package_differences(run: Run) -> list[Difference]:
    lines = (run.directory / "env" / "packages.txt").read_text(encoding="utf-8").splitlines()
    then = dict(line.split("==", 1) for line in lines if "==" in line)
    now = packages()
    names = sorted(name for name in then.keys() | now.keys() if then.get(name) != now.get(name))
    return [
        Difference(f"package {name}", then.get(name, "absent"), now.get(name, "absent"), name in NUMERIC_PACKAGES)
        for name in names
    ]


def _listed(devices: Sequence[str]) -> str:
    return ", ".join(devices) or "no accelerator"
