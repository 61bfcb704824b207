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

from primus.machine.facts import MachineFacts
from primus.machine.profile import Setting

PRODUCTS_VARIABLE = "PRIMUS_TUNED_GEMM"
"""Table of tuned matrix products that a run uses."""
TABLE_FILE = "config/tuned_gemm.json"
"""The table of a run in its folder: a resumed or replayed run uses the same one, since another form rounds
differently."""
HIPBLASLT_VARIABLE = "HIPBLASLT_TUNING_OVERRIDE_FILE"
"""File of solutions that hipBLASLt takes instead of its own choice (hipBLASLt documentation, offline tuning)."""
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
    """Folder of all tuned files, below $XDG_STATE_HOME (XDG Base Directory Specification)."""
    home = environ.get("XDG_STATE_HOME") or os.path.join(environ.get("HOME") or os.path.expanduser("~"), ".local/state")
    return Path(home) / "primus" / "tuned"


def name_tuned_file(environ: Mapping[str, str], kind: str, valid_for: Mapping[str, str]) -> Path:
    """The file of `kind`, such as ``gemm``, for exactly this device, library and number of threads."""
    identity = hashlib.sha256(msgspec.json.encode(sorted(valid_for.items()))).hexdigest()[:12]
    return find_store(environ) / f"{kind}-{identity}.json"


def find_tuned_file(environ: Mapping[str, str], kind: str, known: Mapping[str, str]) -> tuple[Path, TunedFile] | None:
    """The newest file of `kind` that agrees with most of `known`; None if there is none for this device.

    A file for another version is returned as well if there is no better one: the run then says why it does not use it.

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


class TunedSettings(Struct, frozen=True):
    """How the workers of a node use what was tuned."""

    settings: dict[str, Setting] = {}
    files: dict[str, str] = {}
    """Files on the local disk, to be written before the workers start: text by path."""
    notes: tuple[str, ...] = ()


def build_tuned_settings(
    environ: Mapping[str, str], facts: MachineFacts, *, torch: str | None, threads: str, experiment: str
) -> TunedSettings:
    """How the workers of a node use what was tuned for its device; changes nothing.

    Args:
        environ: Names the store.
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
    used = _use_hipblaslt_file(environ, facts)
    return structs.replace(used, settings=settings | used.settings)


def _use_hipblaslt_file(environ: Mapping[str, str], facts: MachineFacts) -> TunedSettings:
    """A file that hipBLASLt reads, copied to the local disk: it opens the file for each new product, which halves the
    speed on a network file system (github.com/ROCm/rocm-libraries/issues/2905)."""
    now = describe_rocm(facts)
    best = find_tuned_file(environ, "hipblaslt", now)
    if best is None:
        return TunedSettings()
    reason = explain_mismatch(best[1].valid_for, now)
    try:
        file = msgspec.json.decode(best[0].read_bytes(), type=TunedText)
    except (OSError, msgspec.MsgspecError):
        reason, file = f"{best[0]} is damaged", None
    if file is None or reason:
        return TunedSettings(notes=(f"tuned: hipBLASLt: not used: {reason}; run tune gemm again",))
    # Named by its content: a file that is tuned again does not change under a run that has opened the old one.
    digest = hashlib.sha256(file.text.encode()).hexdigest()[:16]
    local = str(Path(tempfile.gettempdir()) / f"primus-{os.getuid()}" / f"hipblaslt-{digest}.txt")
    settings = _make_settings({HIPBLASLT_VARIABLE: local}, "gemm")
    return TunedSettings(settings, {local: file.text}, (f"tuned: hipBLASLt: {file.summary}",))


def _make_settings(variables: Mapping[str, str], tuner: str) -> dict[str, Setting]:
    return {
        name: Setting(value=value, reason="tuned for this device", source=f"tune {tuner}")
        for name, value in variables.items()
    }


def describe_rocm(facts: MachineFacts) -> dict[str, str]:
    """What the solutions of hipBLASLt depend on, by name, as far as it is known without the library."""
    first = facts.devices[0]
    return {
        "device": describe_device(facts),
        "architecture": first.architecture or "unknown",
        "compute units": str(first.compute_units),
        "rocm": facts.software.rocm or "unknown",
    }


def describe_device(facts: MachineFacts, *, is_cpu: bool = False) -> str:
    """The model of the device that computes: that of the GPUs, or of the CPU without any."""
    if facts.devices and not is_cpu:
        return facts.devices[0].model or facts.devices[0].name
    return facts.cpu.model


def list_tuned_files(environ: Mapping[str, str], kind: str) -> Iterator[tuple[Path, TunedFile | None]]:
    """All files of `kind` with their headers; None for a damaged one."""
    folder = find_store(environ)
    for path in sorted(folder.glob(f"{kind}-*.json")) if folder.is_dir() else ():
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
