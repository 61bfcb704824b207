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
from primus.runs.files import find_state_folder

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


class TunedFile(Struct, frozen=True, kw_only=True):
    """A file of the store, which holds the text of a file of a GPU library."""

    created: float
    """Seconds since the epoch."""
    valid_for: dict[str, str]
    """Device and versions for which it was tuned, by name."""
    text: str
    summary: str
    """What it is, in a line: ``37 of 40 shapes tuned``."""


def find_store(environ: Mapping[str, str]) -> Path:
    """Folder of all tuned files."""
    return find_state_folder(environ) / "tuned"


def name_tuned_file(environ: Mapping[str, str], kind: str, valid_for: Mapping[str, str]) -> Path:
    """The file of `kind`, such as ``hipblaslt``, for exactly this device and these versions."""
    identity = hashlib.sha256(msgspec.json.encode(sorted(valid_for.items()))).hexdigest()[:12]
    return find_store(environ) / f"{kind}-{identity}.json"


def find_tuned_file(
    environ: Mapping[str, str], kind: str, known: Mapping[str, str]
) -> tuple[Path, TunedFile | None] | None:
    """The newest file of `kind` that agrees with most of `known`; None if there is none for this device.

    A file for another version, or else a damaged one without content, is returned if none fits better: the run then
    says why it does not use it.

    Args:
        environ: Names the store.
        kind: For example ``hipblaslt``.
        known: What is known of this machine, by the names of `TunedFile.valid_for`; the device must agree.
    """
    best: tuple[int, float, Path, TunedFile] | None = None
    damaged: Path | None = None
    for path, file in list_tuned_files(environ, kind):
        if file is None:
            damaged = path
            continue
        if file.valid_for.get("device") != known.get("device"):
            continue
        agreeing = sum(file.valid_for.get(name) == value for name, value in known.items())
        if best is None or (agreeing, file.created) > best[:2]:
            best = (agreeing, file.created, path, file)
    if best is None:
        return (damaged, None) if damaged else None
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


def build_tuned_settings(environ: Mapping[str, str], facts: MachineFacts, torch: str | None) -> TunedSettings:
    """How the workers of a node use what was tuned for its device; changes nothing.

    It is the newest file that hipBLASLt or TunableOp reads, copied to the local disk: hipBLASLt opens it for each new
    product, which halves the speed on a network file system (github.com/ROCm/rocm-libraries/issues/2905).

    Args:
        environ: The variables of the user; names the store.
        facts: The machine.
        torch: Version of PyTorch that the workers import.
    """
    if not any(device.vendor == "amd" for device in facts.devices):
        return TunedSettings()
    now = {HIPBLASLT: describe_rocm(facts), TUNABLEOP: describe_rocm(facts, torch)}
    # At most one of the two, because each was kept after a comparison without the other one.
    found = [(kind, *best) for kind in now if (best := find_tuned_file(environ, kind, now[kind])) is not None]
    if not found:
        return TunedSettings()
    # A stale or damaged file does not hide a valid one of the other library.
    kind, path, file = max(
        found,
        key=lambda each: (not explain_mismatch(each[2].valid_for, now[each[0]]), each[2].created) if each[2] else (),
    )
    name = {HIPBLASLT: "hipBLASLt", TUNABLEOP: "TunableOp"}[kind]
    reason = explain_mismatch(file.valid_for, now[kind]) if file else f"{path} is damaged"
    mode = environ.get(RUNTIME_TUNING, "") if kind == HIPBLASLT else ""
    if mode == "tune" or (mode == "cache" and environ.get(RUNTIME_CACHE)):
        return TunedSettings(notes=(f"tuned: {name}: not used: {RUNTIME_TUNING}={mode} reads {RUNTIME_CACHE}",))
    if file is None or reason:
        return TunedSettings(notes=(f"tuned: {name}: not used: {reason}; run tune gemm again",))
    copies = _copy_to_local_disk(kind, file, len(facts.devices), f"tuned: {name}: {file.summary}")
    if mode == "cache":
        copies = structs.replace(copies, variable=RUNTIME_CACHE)
    variables = {**(TUNABLEOP_SETTINGS if kind == TUNABLEOP else {}), copies.variable: copies.value}
    why = "tuned for this device"
    settings = {name: Setting(value=value, reason=why, source="tune gemm") for name, value in variables.items()}
    return TunedSettings(settings, copies)


def _copy_to_local_disk(kind: str, file: TunedFile, num_devices: int, note: str) -> LocalCopies:
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


def describe_rocm(facts: MachineFacts, torch: str | None = None) -> dict[str, str]:
    """What the solutions of hipBLASLt, and with `torch` those of TunableOp, depend on, by name, as far as it is known
    without the libraries."""
    first = facts.devices[0]
    return {
        "device": first.model or first.name,
        "architecture": first.architecture or "unknown",
        "compute units": str(first.compute_units),
        "rocm": facts.software.rocm or "unknown",
        **({"torch": torch} if torch else {}),
    }


def list_tuned_files(environ: Mapping[str, str], kind: str) -> Iterator[tuple[Path, TunedFile | None]]:
    """All files of `kind` with their content; None for a damaged one."""
    # A tuner may replace a file meanwhile, by rename: each read sees a whole file.
    folder = find_store(environ)
    for path in sorted(folder.glob(f"{kind}-*.json")) if os.path.isdir(folder) else ():
        try:
            file = msgspec.json.decode(path.read_bytes(), type=TunedFile)
        except (OSError, msgspec.MsgspecError):
            file = None
        yield path, file


def explain_mismatch(valid_for: Mapping[str, str], now: Mapping[str, str]) -> str:
    """Why a file does not apply here: ``tuned for torch 2.12.0, this is 2.13.0``; empty if it does."""
    for name, value in valid_for.items():
        if now.get(name) != value:
            return f"tuned for {name} {value}, this is {now.get(name, 'unknown')}"
    return ""
