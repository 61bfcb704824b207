"""What was tuned on this machine and is used by later runs: one file for each device, library and number of threads.

The files are in the user's state folder, which hosts may share; each states what it is valid for.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

import msgspec
from msgspec import Struct, structs

from primus.errors import UsageError
from primus.machine.environment.hipblaslt import HIPBLASLT_VARIABLE, RUNTIME_CACHE, RUNTIME_MODES, RUNTIME_TUNING
from primus.machine.facts import MachineFacts
from primus.machine.profile import Setting
from primus.runs.state_folder import find_state_folder

PRODUCTS_VARIABLE = "PRIMUS_TUNED_GEMM"
"""Table of tuned matrix products that a run uses."""
TABLE_FILE = "config/tuned_gemm.json"
"""The table of a run in its folder: a resumed or replayed run uses the same one, since another form rounds
differently."""
TUNABLEOP_VARIABLE = "PYTORCH_TUNABLEOP_FILENAME"
"""File of solutions that TunableOp takes; PyTorch puts the number of the device before its suffix
(torch/cuda/tunable.py, "File Input and Output")."""
TUNABLEOP_SETTINGS = {
    "PYTORCH_TUNABLEOP_ENABLED": "1",
    "PYTORCH_TUNABLEOP_TUNING": "0",
    "PYTORCH_TUNABLEOP_RECORD_UNTUNED": "0",
}
"""Variables with which PyTorch takes known solutions, and tunes no others."""
HIPBLASLT, TUNABLEOP = "hipblaslt", "tunableop"
"""Kinds of the files of GPU libraries in the store."""
INDUCTOR_VARIABLE = "PRIMUS_TUNED_INDUCTOR"
"""Archive of compiled kernels that a run unpacks before it compiles."""

MUST_AGREE = ("device", "experiment")
"""Files for another device or, where it matters, another experiment are not looked at."""


class TunedFile(Struct, frozen=True, kw_only=True):
    """The fields that every file of the store has."""

    created: float = 0.0
    """Seconds since the epoch."""
    valid_for: dict[str, str] = {}
    """Device, versions and threads for which it was tuned, by name."""
    variables: dict[str, str] = {}
    """Variables that a run with it needs."""


class TunedText(TunedFile, frozen=True, kw_only=True):
    """A file of the store that holds the text of a file of another library."""

    text: str
    summary: str
    """What it is, in a line: ``37 of 40 shapes tuned``."""


def find_store(environ: Mapping[str, str]) -> Path:
    """Folder of all tuned files."""
    return find_state_folder(environ) / "tuned"


def name_tuned_file(environ: Mapping[str, str], kind: str, valid_for: Mapping[str, str]) -> Path:
    """The file of `kind`, such as ``gemm``, for exactly this device, library and number of threads."""
    identity = hashlib.sha256(msgspec.json.encode(sorted(valid_for.items()))).hexdigest()[:12]
    return find_store(environ) / f"{kind}-{identity}.json"


def find_tuned_file(environ: Mapping[str, str], kind: str, known: Mapping[str, str]) -> tuple[Path, TunedFile] | None:
    """The newest file of `kind` that agrees with most of `known`; None if there is none for this device.

    A file for another version is returned if none fits better: the run then says why it does not use it.

    Args:
        environ: Names the store.
        kind: For example ``gemm``.
        known: What is known of this machine, by the names of `TunedFile.valid_for`; those in `MUST_AGREE` must agree.
    """
    best: tuple[int, float, Path, TunedFile] | None = None
    damaged: Path | None = None
    for path, header in list_tuned_files(environ, kind):
        if header is None:
            damaged = path
            continue
        if any(header.valid_for.get(name, known.get(name)) != known.get(name) for name in MUST_AGREE):
            continue
        agreeing = sum(header.valid_for.get(name) == value for name, value in known.items())
        if best is None or (agreeing, header.created) > best[:2]:
            best = (agreeing, header.created, path, header)
    if best is None:  # the code that reads a damaged file reports it
        return (damaged, TunedFile()) if damaged else None
    return best[2:]


class LocalCopies(Struct, frozen=True, kw_only=True):
    """A file of a GPU library on the local disk, for the case that its variable names it."""

    variable: str
    value: str
    files: dict[str, str]
    """To be written before the workers start: text by path."""
    note: str


class TunedSettings(Struct, frozen=True):
    """How the workers of a node use what was tuned."""

    settings: dict[str, Setting] = {}
    copies: LocalCopies | None = None
    notes: tuple[str, ...] = ()


def check_override_is_read(environ: Mapping[str, str]) -> None:
    """Check that hipBLASLt reads an override file.

    Raises:
        UsageError: It reads a cache instead.
    """
    mode = environ.get(RUNTIME_TUNING, "")
    if mode in RUNTIME_MODES[1:]:
        raise UsageError(
            f"${RUNTIME_TUNING}={mode}: hipBLASLt ignores {HIPBLASLT_VARIABLE} in this mode", f"unset {RUNTIME_TUNING}"
        )


def build_tuned_settings(
    environ: Mapping[str, str], facts: MachineFacts, *, torch: str | None, threads: str, experiment: str
) -> TunedSettings:
    """How the workers of a node use what was tuned for its device; changes nothing.

    Args:
        environ: The variables of the user; names the store.
        facts: The machine.
        torch: Version of PyTorch that the workers import.
        threads: Threads of a process on the CPU.
        experiment: Name of the experiment.
    """
    known = {"device": describe_device(facts), "experiment": experiment, **({"torch": torch} if torch else {})}
    found = {INDUCTOR_VARIABLE: ("inductor", known)}
    if not facts.devices:
        found[PRODUCTS_VARIABLE] = ("gemm", {**known, "threads": threads})
    settings: dict[str, Setting] = {}
    for name, (kind, wanted) in found.items():
        best = find_tuned_file(environ, kind, wanted)
        if best is not None:
            settings |= _make_settings({name: str(best[0]), **best[1].variables}, kind)
    if not any(device.vendor == "amd" for device in facts.devices):
        return TunedSettings(settings)
    used = _use_gpu_file(environ, facts, torch)
    return structs.replace(used, settings=settings | used.settings)


def _use_gpu_file(environ: Mapping[str, str], facts: MachineFacts, torch: str | None) -> TunedSettings:
    """The newest file that hipBLASLt or TunableOp reads, copied to the local disk: hipBLASLt opens it for each new
    product, which halves the speed on a network file system (github.com/ROCm/rocm-libraries/issues/2905)."""
    now = {HIPBLASLT: describe_rocm(facts), TUNABLEOP: describe_rocm(facts, torch)}
    # At most one of the two, because each was kept after a comparison without the other one.
    found = [(kind, best) for kind in now if (best := find_tuned_file(environ, kind, now[kind])) is not None]
    if not found:
        return TunedSettings()
    # A stale file does not hide a valid one of the other library.
    kind, (path, header) = max(
        found, key=lambda each: (not explain_mismatch(each[1][1].valid_for, now[each[0]]), each[1][1].created)
    )
    name = {HIPBLASLT: "hipBLASLt", TUNABLEOP: "TunableOp"}[kind]
    reason = explain_mismatch(header.valid_for, now[kind])
    try:
        file = msgspec.json.decode(path.read_bytes(), type=TunedText)
    except (OSError, msgspec.MsgspecError):
        reason, file = f"{path} is damaged", None
    mode = environ.get(RUNTIME_TUNING, "") if kind == HIPBLASLT else ""
    if mode == "tune" or (mode == "cache" and environ.get(RUNTIME_CACHE)):
        return TunedSettings(notes=(f"tuned: {name}: not used: {RUNTIME_TUNING}={mode} reads {RUNTIME_CACHE}",))
    if file is None or reason:
        return TunedSettings(notes=(f"tuned: {name}: not used: {reason}; run tune gemm again",))
    copies = _copy_to_local_disk(kind, file, len(facts.devices), f"tuned: {name}: {file.summary}")
    if mode == "cache":
        copies = structs.replace(copies, variable=RUNTIME_CACHE)
    variables = {**(TUNABLEOP_SETTINGS if kind == TUNABLEOP else {}), copies.variable: copies.value}
    return TunedSettings(_make_settings(variables, "gemm"), copies)


def _copy_to_local_disk(kind: str, file: TunedText, num_devices: int, note: str) -> LocalCopies:
    # Named by its content: a file that is tuned again does not change under a run that has opened the old one.
    digest = hashlib.sha256(file.text.encode()).hexdigest()[:16]
    folder = Path(tempfile.gettempdir()) / f"primus-{os.getuid()}"
    if kind == HIPBLASLT:
        local = folder / f"hipblaslt-{digest}.txt"
        return LocalCopies(variable=HIPBLASLT_VARIABLE, value=str(local), files={str(local): file.text}, note=note)
    local = folder / f"tunableop-{digest}-.csv"
    files = {str(copy): file.text for copy in list_device_copies(local, num_devices)}
    return LocalCopies(variable=TUNABLEOP_VARIABLE, value=str(local), files=files, note=note)


def list_device_copies(path: Path, num_devices: int) -> list[Path]:
    """The files that PyTorch reads for `path` in `TUNABLEOP_VARIABLE`, one for each device."""
    return [path.with_name(f"{path.stem}{number}{path.suffix}") for number in range(max(1, num_devices))]


def _make_settings(variables: Mapping[str, str], tuner: str) -> dict[str, Setting]:
    return {
        name: Setting(value=value, reason="tuned for this device", source=f"tune {tuner}")
        for name, value in variables.items()
    }


def describe_rocm(facts: MachineFacts, torch: str | None = None) -> dict[str, str]:
    """What the solutions of hipBLASLt, and with `torch` those of TunableOp, depend on, by name, as far as it is known
    without the libraries."""
    first = facts.devices[0]
    return {
        "device": describe_device(facts),
        "architecture": first.architecture or "unknown",
        "compute units": str(first.compute_units),
        "rocm": facts.software.rocm or "unknown",
        **({"torch": torch} if torch else {}),
    }


def describe_device(facts: MachineFacts, *, is_cpu: bool = False) -> str:
    """The model of the device that computes: that of the GPUs, or of the CPU without any."""
    if facts.devices and not is_cpu:
        return facts.devices[0].model or facts.devices[0].name
    return facts.cpu.model


def list_tuned_files(environ: Mapping[str, str], kind: str) -> Iterator[tuple[Path, TunedFile | None]]:
    """All files of `kind` with their headers; None for a damaged one."""
    # A tuner may replace a file meanwhile, by rename: each read sees a whole file.
    folder = find_store(environ)
    for path in sorted(folder.glob(f"{kind}-*.json")) if os.path.isdir(folder) else ():
        try:
            header = msgspec.json.decode(path.read_bytes(), type=TunedFile)
        except (OSError, msgspec.MsgspecError):
            header = None
        yield path, header


def explain_mismatch(valid_for: Mapping[str, str], now: Mapping[str, str]) -> str:
    """Why a file does not apply here: ``tuned for torch 2.12.0, this is 2.13.0``; empty if it does."""
    for name, value in valid_for.items():
        if now.get(name) != value:
            return f"tuned for {name} {value}, this is {now.get(name, 'unknown')}"
    return ""
