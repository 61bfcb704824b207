"""The files of a run folder as an archive has them: without secrets, and without paths of the machine."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from primus.errors import PrimusError, find_owner
from primus.experiment import CONFIG_FILE
from primus.redaction import redact
from primus.run_archive.local_paths import PathNames, restore_paths
from primus.run_archive.manifest import RUN
from primus.runs.files import read_json
from primus.runs.source_record import read_plug_in_records
from primus.runs.store import Run

PATTERNS = (
    *("metadata.json", "request.json", "plan.json", "nodes.json", "rewinds.json", "launch.*.json", "container*.json"),
    *("job.sh", "kubernetes/*", "events.jsonl", "config/**/*", "env/**/*", "logs/**/*", "report/**/*"),
)
"""Files of an archive. Not among them: locks and the record of a job, which mean something where the run was executed
only; traces, and TensorBoard files, whose values are in events.jsonl."""
NEEDED = ("request.json", "plan.json", "events.jsonl", CONFIG_FILE, "env/system_info.json", "env/packages.txt")
"""Files without which a run cannot be repeated or compared."""
LARGEST_LOG = 64 << 20
"""Bytes of a log that an archive has; of a larger one the end says what happened, and the events have the numbers."""
RESTORED = ("config/*.yaml", "plan.json", "env/primus_env_dump.txt")
"""Files that a replay reads paths from."""
PLUG_INS = "env/plug-ins"
"""Folder of an imported run with its plug-ins and hooks, by the number of their folder."""
ADDRESSES = "addresses"
"""Key of system_info.json with the addresses of network interfaces, which no replay compares."""


def check_files(run: Run) -> None:
    """Check that a run folder is whole, and that this user may read all of it.

    Raises:
        PrimusError: A file is missing, or belongs to another user.
    """
    missing = [name for name in NEEDED if not (run.directory / name).is_file()]
    if missing:
        raise PrimusError(f"{run.directory}: damaged: {missing[0]} is missing", "`runs list` shows other runs")
    for path in list_files(run):
        try:
            path.open("rb").close()
        except OSError as error:
            raise PrimusError(
                f"{path}: cannot be read: {error.strerror}", f"it belongs to {find_owner(path)}, who can export it"
            ) from None
    read_json(run.directory / "plan.json", dict)


def list_files(run: Run) -> list[Path]:
    """The files of a run that an archive has, large logs included."""
    found = {path for pattern in PATTERNS for path in run.directory.glob(pattern)}
    return sorted(path for path in found if path.is_file() and not path.is_symlink() and not path.name.startswith("."))


def write_run_files(
    run: Run, folder: Path, names: PathNames, settings: Mapping[str, object], omitted: list[str]
) -> None:
    """Write the files of `run` into `folder`.

    Args:
        run: The run.
        folder: A new folder, which becomes the archive.
        names: Replaces the folders of this machine.
        settings: Values of the configuration that are others in the archive.
        omitted: Receives the names of what is left out.
    """
    for path in list_files(run):
        name = path.relative_to(run.directory).as_posix()
        if path.stat().st_size > LARGEST_LOG and name.startswith(("logs/", "report/")):
            omitted.append(f"{name}: larger than {LARGEST_LOG >> 20} MiB")
            continue
        data = path.read_bytes()
        if name == CONFIG_FILE and settings:
            data = _change_settings(data.decode("utf-8"), settings).encode()
        if name.startswith("env/") and name.endswith("system_info.json"):
            data = _drop_addresses(data)
        target = folder / RUN / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(_clean(data, names))


def write_plug_ins(run: Run, folder: Path, names: PathNames, omitted: list[str]) -> None:
    """Write the plug-ins and hooks of `run` that are as they were into `folder`; the others are named in `omitted`."""
    for record in read_plug_in_records(run):
        try:
            data = Path(record.path).read_bytes()
        except OSError:
            data = b""
        if hashlib.sha256(data).hexdigest() != record.sha256:
            omitted.append(f"plug-in {record.name}: it has changed since the run")
            continue
        text = _clean(data, names)
        if text != data:
            omitted.append(f"plug-in {record.name}: its secrets, or names of folders")
        target = folder / RUN / PLUG_INS / record.name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(text)


def _clean(data: bytes, names: PathNames) -> bytes:
    """`data` without secrets and local paths; what is no text stays."""
    try:
        return names.replace(redact(data.decode("utf-8"))).encode("utf-8")
    except UnicodeDecodeError:
        if b"\0" in data[:4096]:
            return data
        # A log of a program that wrote another encoding.
        return names.replace(redact(data.decode("utf-8", "surrogateescape"))).encode("utf-8", "surrogateescape")


def _drop_addresses(data: bytes) -> bytes:
    import msgspec

    tree = msgspec.json.decode(data)
    for interface in (tree.get("facts") or {}).get("interfaces", ()):
        interface.pop(ADDRESSES, None)
    return msgspec.json.format(msgspec.json.encode(tree), indent=2) + b"\n"


def _change_settings(text: str, settings: Mapping[str, object]) -> str:
    """An experiment with other values of some settings of its module."""
    import yaml

    from primus.config.source import dump_yaml

    whole = yaml.safe_load(text)
    for module in whole["modules"].values():
        module["overrides"] |= settings
    return dump_yaml(whole)


def restore_run_files(folder: Path, places: Mapping[str, str]) -> None:
    """Replace the names in the files that a replay reads by the folders of this machine.

    Raises:
        PrimusError: A file is damaged.
    """
    for pattern in RESTORED:
        for path in sorted(folder.glob(pattern)):
            path.write_text(_restore_text(path, places), encoding="utf-8")


def _restore_text(path: Path, places: Mapping[str, str]) -> str:
    import msgspec
    import yaml

    from primus.config.source import dump_yaml

    try:
        text = path.read_text(encoding="utf-8")
        if path.suffix == ".txt":
            return str(restore_paths(text, places))
        if path.suffix == ".yaml":
            return dump_yaml(restore_paths(yaml.safe_load(text), places))
        tree: Any = msgspec.json.decode(text)
        return msgspec.json.format(msgspec.json.encode(restore_paths(tree, places)), indent=2).decode() + "\n"
    except (yaml.YAMLError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise PrimusError(f"{path.name}: damaged: {error}", "ask for the archive again") from None


def list_local_paths(run_folder: Path) -> Iterator[str]:
    """Absolute paths in the settings of a run."""
    from primus.runs.summary import flatten_run_settings

    for key, value in flatten_run_settings(Run(run_folder)).items():
        for word in value if isinstance(value, list) else str(value).split():
            if str(word).startswith("/"):
                yield f"{key}: {word}"
