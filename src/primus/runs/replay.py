"""Compare the machine of a run with this one."""

from __future__ import annotations

import hashlib
import os
import re
import sys
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from msgspec import Struct

from primus.errors import PrimusError
from primus.machine.facts import MachineFacts
from primus.redaction import MASK, are_comparable, fingerprint_key, is_fingerprint
from primus.runs import events, patch_records, source_record
from primus.runs.files import read_json
from primus.runs.snapshot import SystemInfo, collect_system_info
from primus.runs.store import Run
from primus.site_folders import list_package_versions

NUMERIC_PACKAGES = ("torch", "numpy", "tokenizers", "primus")
"""Packages whose version may change a loss."""

NUMERIC_VARIABLES = re.compile(
    r"(OMP|MKL|OPENBLAS|ONEDNN|DNNL|NCCL|RCCL|TORCH|PYTORCH|CUDA|CUBLAS|CUDNN|HIP|HSA|ROCM|ROCBLAS|HIPBLASLT|NVTE|ATEN)_\w+"
)
"""Variables of the shell that may change a loss, or which devices are used."""

NUMERIC_PLUG_INS = ("frameworks/", "backends/", "callbacks/", "documents/", "patches/", "sources/")
"""Folders of plug-ins that take part in a training. A hook is not among them: the launcher refuses one that changes the
configuration of a replay."""
HARMLESS_PLUG_INS = ("benchmarks/", "runtimes/", "tasks/")
OTHER_KERNELS = "may change the last bits of the losses: other kernels; and speed and memory"
OTHER_SUMS = "may change the last bits of the losses: sums in another order; and speed"
MAYBE_KERNELS = "may change which kernels libraries choose, and so the last bits of the losses"

TUNED_PRODUCTS = "config/tuned_gemm.json"
"""Matrix products of a CPU that an earlier version of primus tuned (docs/decisions/0039)."""


class Difference(Struct, frozen=True):
    """One difference from the replayed run."""

    what: str
    then: str
    now: str
    changes_numbers: bool
    """Whether it may change a loss."""
    effect: str = ""
    """What it can change."""

    def __str__(self) -> str:
        effect = self.effect or ("may change the losses" if self.changes_numbers else "changes no numbers")
        return f"{self.what}: {self.then} then, {self.now} now ({effect})"


def find_differences(
    run: Run, packages: Mapping[str, str] | None = None, engine_packages: Collection[str] = ()
) -> list[Difference]:
    """All differences between the machine of `run` and this one, those that may change numbers first.

    Args:
        run: The run.
        packages: Packages that its workers would have now; None for those of this interpreter.
        engine_packages: Packages of its engine, which may change a loss.

    Raises:
        PrimusError: The run has no snapshot.
    """
    then = read_json(run.directory / "env" / "system_info.json", SystemInfo)
    now = collect_system_info()
    found = [
        Difference("devices", _format_devices(then.devices), _format_devices(now.devices), True, OTHER_KERNELS)
        if then.devices != now.devices
        else None,
        Difference("processor", then.cpu_model, now.cpu_model, True, OTHER_KERNELS)
        if then.cpu_model != now.cpu_model
        else None,
        Difference("cores", str(then.cpu_cores), str(now.cpu_cores), True, OTHER_SUMS)
        if then.cpu_cores != now.cpu_cores
        else None,
        Difference("python", then.python, now.python, False) if then.python != now.python else None,
        Difference("kernel", then.kernel, now.kernel, False) if then.kernel != now.kernel else None,
        Difference("host", then.host, now.host, False) if then.host != now.host else None,
        Difference("matrix products", f"as in {TUNED_PRODUCTS}", "PyTorch's own", True)
        if (run.directory / TUNED_PRODUCTS).exists()
        else None,
    ]
    all_found = [
        *(difference for difference in found if difference),
        *_compare_software(then.facts, now.facts),
        *_compare_packages(run, packages, engine_packages),
    ]
    return sorted(all_found, key=lambda difference: not difference.changes_numbers)


def patch_differences(run: Run, python_patches: Sequence[str], files: Sequence[str]) -> list[Difference]:
    """Differences from the patches of `run`.

    Args:
        run: The run.
        python_patches: Names of the patches of upstream packages that would be applied now.
        files: Files of `--patch` that are given now; none repeats those of the run.

    Raises:
        PrimusError: A file cannot be read, or the run's record is damaged.
    """
    before = [event["applied"] for event in events.read_events(run.events) if event["kind"] == "patches"]
    then = [each["name"] for each in before[-1]] if before else []
    found = []
    if sorted(then) != sorted(python_patches):
        found.append(Difference("patches", ", ".join(then) or "none", ", ".join(python_patches) or "none", True))
    kept = [f"{record.file} {record.sha256[:8]}" for record in patch_records.read_records(run)]
    given = [f"{file} {patch_records.hash_patch(_read_content(file))[:8]}" for file in files]
    if given and [each.split()[-1] for each in kept] != [each.split()[-1] for each in given]:
        found.append(Difference("patch files", ", ".join(kept) or "none", ", ".join(given), True))
    return found


def _read_content(file: str) -> bytes:
    try:
        return Path(os.path.expanduser(file)).read_bytes()
    except OSError as error:
        raise PrimusError(f"{file}: cannot be read: {error.strerror}") from None


def hidden_differences(run: Run, environ: Mapping[str, str]) -> list[Difference]:
    """Variables that `run` passed on by name and whose values it does not hold, if `environ` has other values now.

    Raises:
        PrimusError: The run has no plan.
    """
    found = []
    for name, then in _list_planned_variables(run).items():
        if is_fingerprint(then):
            now = fingerprint_key.compute(name, environ[name]) if name in environ else "absent"
            if now != then:
                found.append(Difference(f"variable {name}", then, now, are_comparable(then, now)))
    return found


def list_replay_variables(run: Run, environ: Mapping[str, str]) -> dict[str, str]:
    """Variables that give workers the environment of those of `run`: set by the run, or relevant to numerical results.

    Values that the run does not hold are excluded; they are read from the current environment.

    Raises:
        PrimusError: The run has no plan, or no dump of its environment.
    """
    wanted = _list_numeric_variables(run) | _list_planned_variables(run)
    return {
        name: value
        for name, value in wanted.items()
        if environ.get(name) != value and MASK not in value and not is_fingerprint(value)
    }


def _list_numeric_variables(run: Run) -> dict[str, str]:
    """Variables that may change numerical results, regardless of their origin."""
    found: dict[str, str] = {}
    for line in _read_lines(run, "primus_env_dump.txt"):
        name, equals, value = line.rpartition("  # ")[0].partition("=")
        if equals and NUMERIC_VARIABLES.fullmatch(name):
            found[name] = value
    return found


def _list_planned_variables(run: Run) -> dict[str, str]:
    """Variables that the run set, except those that every launch computes.

    The latter include path lists, such as PATH, that a hook has extended.
    """
    planned = read_json(run.directory / "plan.json", _Plan).env
    return {
        name: variable.value
        for name, variable in planned.items()
        if variable.source != "terminal"
        and not variable.source.startswith("network: ")
        and not (name.endswith("PATH") and variable.source.startswith(("hook:", "patch:")))
    }


def source_differences(run: Run, folders: Sequence[Path]) -> list[Difference]:
    """Differences from the checkout, the plug-ins and the hooks of `run`.

    Args:
        run: The run.
        folders: Folders of the user's plug-ins and hooks now.

    Raises:
        PrimusError: A record is damaged.
    """
    then, (now, _) = source_record.read_source_record(run), source_record.read_sources()
    found = []
    if then and then.package_sha256 != now.package_sha256:
        # No reason to stop: most commits do not touch what computes a loss.
        effect = "may change the losses if it touches what computes them"
        found.append(Difference("sources of primus", str(then), str(now), False, effect))
    records = source_record.read_plug_in_records(run)
    files = source_record.list_plug_in_files(folders) if records else ()
    present = {name.partition("/")[2]: hashlib.sha256(path.read_bytes()).hexdigest() for name, path in files}
    for record in records:
        name = record.name.partition("/")[2]
        if present.get(name) != record.sha256:
            is_numeric = name.startswith(NUMERIC_PLUG_INS)
            effect = "" if is_numeric or name.startswith(HARMLESS_PLUG_INS) else "may change the losses by what it sets"
            now_there = present.get(name, "absent")[:8]
            found.append(Difference(f"plug-in {name}", record.sha256[:8], now_there, is_numeric, effect))
    return found


class _Variable(Struct, frozen=True):
    value: str
    source: str


class _Plan(Struct, frozen=True):
    """The part of plan.json that a replay reads."""

    env: dict[str, _Variable]


def _read_lines(run: Run, name: str) -> list[str]:
    path = run.directory / "env" / name
    try:
        return path.read_text(encoding="utf-8", errors="replace").split("\n")
    except OSError as error:
        raise PrimusError(f"{path}: cannot be read: {error.strerror}") from None


def _compare_software(then: MachineFacts | None, now: MachineFacts | None) -> list[Difference]:
    """Drivers, toolkits and firmware of devices that differ; a run of an older version did not record them."""
    if then is None or now is None:
        return []
    found = [
        Difference(name, str(before or "none"), str(after or "none"), False, MAYBE_KERNELS)
        for name, before, after in (
            ("AMD driver", then.software.amd_driver, now.software.amd_driver),
            ("NVIDIA driver", then.software.nvidia_driver, now.software.nvidia_driver),
            ("ROCm", then.software.rocm, now.software.rocm),
            ("CUDA", then.software.cuda, now.software.cuda),
        )
        if before != after
    ]
    for before, after in zip(then.devices, now.devices, strict=False):
        if before.model == after.model and before.firmware != after.firmware:
            a, b = (", ".join(f"{name} {text}" for name, text in each.firmware.items()) for each in (before, after))
            return [*found, Difference("firmware", a or "unknown", b or "unknown", False)]
    return found


def _compare_packages(
    run: Run, packages: Mapping[str, str] | None, engine_packages: Collection[str]
) -> list[Difference]:
    then = dict(line.split("==", 1) for line in _read_lines(run, "packages.txt") if "==" in line)
    now = list_package_versions(sys.path) if packages is None else packages
    numeric = {*NUMERIC_PACKAGES, *engine_packages}
    names = sorted(name for name in then.keys() | now.keys() if then.get(name) != now.get(name))
    return [
        Difference(f"package {name}", then.get(name, "absent"), now.get(name, "absent"), name in numeric)
        for name in names
    ]


def _format_devices(devices: Sequence[str]) -> str:
    return ", ".join(devices) or "no accelerator"
