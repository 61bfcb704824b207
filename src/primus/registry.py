"""Finds plug-ins by name in the folders of `$PRIMUS_PLUGINS`, the package and entry points; imports them on use.

The name of a plug-in is the name of its file, ignoring case; `-` equals `_`. A folder of tasks is the first word of
their names: `tasks/runs/list.py` is the task `runs list`. In every other kind a folder with `__init__.py` is one
plug-in.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import os
import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from primus.contract import ContractT, PlugInKind, complete_module
from primus.errors import PrimusError, UsageError, did_you_mean, format_error_place

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

PACKAGE = Path(__file__).parent
FOLDERS = {
    "tasks": "tasks",
    "runtimes": "runtimes",
    "backends": "backends",
    "benchmarks": "benchmarks",
    "callbacks": "callbacks",
    "patches": "patches",
    "profiles": "machine/profiles",
    "architectures": "machine/architectures",
    "nics": "machine/nics",
    "frameworks": "machine/frameworks",
    "sources": "data/sources",
    "models": "presets/models",
    "trainers": "presets/trainers",
    "engines": "presets/engines",
    "images": "presets/images",
}
"""Folder in the package that holds the plug-ins of each kind."""

SUBCOMMANDS = "cli/subcommands"
"""Folder of tasks in a checkout where users of AMD-AGI/Primus put theirs; see `primus.cli.registry`."""

DATA_KINDS = frozenset({"models", "trainers", "engines", "images", "profiles", "architectures", "nics"})
"""Kinds whose plug-ins are YAML files."""

PLUG_IN_MODULES = "primus_plugins"
"""Package name under which files of the user are imported."""

SINGULAR = {kind: kind.removesuffix("s") for kind in FOLDERS} | {"patches": "patch"}


def list_plug_ins(kind: str) -> list[str]:
    """Names of all plug-ins of a `kind` as users type them, sorted; a task in a folder is ``"folder name"``."""
    files = [file for folder in _list_folders(kind) for file in _list_plug_in_files(folder, kind).values()]
    return sorted({_format_typed_name(kind, file) for file in files} | set(_list_entry_points(kind)))


def find_plug_in_file(kind: str, name: str) -> Path | None:
    """File of the plug-in `name`; None if an entry point provides it.

    Raises:
        UsageError: The plug-in does not exist; the message names the nearest.
    """
    for folder in _list_folders(kind):
        found = _list_plug_in_files(folder, kind).get(_normalize_name(name))
        if found:
            return found
    if _normalize_name(name) in map(_normalize_name, _list_entry_points(kind)):
        return None
    raise UsageError(f"no {SINGULAR[kind]} '{name}'", did_you_mean(name, list_plug_ins(kind)))


def has_plug_in(kind: str, name: str) -> bool:
    """Whether there is a plug-in `name` of a `kind`."""
    return _normalize_name(name) in map(_normalize_name, list_plug_ins(kind))


def load_plug_in(kind: PlugInKind[ContractT], name: str) -> ContractT:
    """Import the plug-in `name` of a `kind`; the module implements the contract of the kind, defaults included.

    Raises:
        UsageError: The plug-in does not exist; the message names the nearest.
        PrimusError: The plug-in cannot be imported, or does not implement the contract.
    """
    return cast("ContractT", _load_once(kind, name, find_plug_in_file(kind.name, name)))


@cache
def _load_once(kind: PlugInKind[Any], name: str, file: Path | None) -> ModuleType:
    label = f"{SINGULAR[kind.name]} '{name}'"
    is_built_in = file is not None and file.is_relative_to(PACKAGE)
    if file is None:
        point = _find_entry_point(kind.name, name)
        module, origin = _import_foreign(label, point.load), point.value
    elif is_built_in:
        parts = file.relative_to(PACKAGE.parent).with_suffix("").parts
        module, origin = importlib.import_module(".".join(part for part in parts if part != "__init__")), str(file)
    else:
        module, origin = _import_foreign(label, lambda: _load_file(kind.name, name, file)), str(file)
    complete_module(kind, module, label, origin, is_built_in)
    return module


def read_summary(kind: str, name: str) -> str:
    """First line of the docstring, or of the leading comment in a YAML file; read without importing the plug-in."""
    file = find_plug_in_file(kind, name)
    if file is None:
        return f"from {_find_entry_point(kind, name).value}"
    with file.open(encoding="utf-8", errors="ignore") as lines:
        first = next(lines, "").strip()
    return first.lstrip("#").removeprefix('"""').removesuffix('"""').strip()


class PlugInPlace(NamedTuple):
    """The line of a plug-in outside this package that an exception passed through."""

    place: str
    """`file.py:12`."""
    is_origin: bool
    """Whether the plug-in, or a library that it called, raised the exception, not this package."""


def find_failing_plug_in(error: BaseException) -> PlugInPlace | None:
    """The innermost line of a plug-in that `error` passed through; None if only this package was involved."""
    frames = []
    trace = error.__traceback__
    while trace:
        frames.append((trace.tb_frame, trace.tb_lineno))
        trace = trace.tb_next
    is_origin = True
    for frame, line in reversed(frames):
        file, module = Path(frame.f_code.co_filename), str(frame.f_globals.get("__name__", ""))
        if _is_foreign(file, module):
            return PlugInPlace(f"{file}:{line}", is_origin)
        is_origin = is_origin and not file.is_relative_to(PACKAGE)
    return None


def _is_foreign(file: Path, module: str) -> bool:
    """Whether a module belongs to a plug-in outside this package: a user's file, or a package with entry points."""
    roots = [Path(os.path.expanduser(root)) for root in os.environ.get("PRIMUS_PLUGINS", "").split(os.pathsep) if root]
    packages = {
        point.value.partition(":")[0].partition(".")[0]
        for kind in FOLDERS
        for point in _list_entry_points(kind).values()
    }
    is_users = module.startswith(f"{PLUG_IN_MODULES}.") or any(file.is_relative_to(root) for root in roots)
    return is_users or (module.partition(".")[0] in packages and not file.is_relative_to(PACKAGE))


def _import_foreign(label: str, import_it: Callable[[], ModuleType]) -> ModuleType:
    """Import a plug-in outside this package; an exception becomes one message with file and line."""
    try:
        return import_it()
    except PrimusError:
        raise
    except SyntaxError as error:
        raise PrimusError(f"{label} cannot be loaded: {error.filename}:{error.lineno}: {error.msg}") from error
    except (Exception, SystemExit) as error:  # a plug-in may raise anything while it is imported
        raise PrimusError(
            f"{label} cannot be loaded: {format_error_place(error)}: {type(error).__name__}: {error}"
        ) from error


def _load_file(kind: str, name: str, file: Path) -> ModuleType:
    module_name = f"{PLUG_IN_MODULES}.{kind}.{_normalize_name(name).replace(' ', '.')}"
    if module_name in sys.modules and sys.modules[module_name].__file__ == str(file):
        return sys.modules[module_name]
    spec = importlib.util.spec_from_file_location(module_name, file)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[module_name]
        raise
    return module


def _normalize_name(name: str) -> str:
    return name.lower().replace("-", "_").removesuffix(".yaml")


def _format_typed_name(kind: str, file: Path) -> str:
    if kind in DATA_KINDS:
        return file.stem
    plug_in = file.parent if file.name == "__init__.py" else file
    in_group = kind == "tasks" and plug_in.parent.name != "tasks"
    return (f"{plug_in.parent.name} {plug_in.stem}" if in_group else plug_in.stem).lower().replace("_", "-")


def _list_folders(kind: str) -> Iterator[Path]:
    """Folders of a kind; those of the user come first, so that a user's file replaces one of the package."""
    for root in os.environ.get("PRIMUS_PLUGINS", "").split(os.pathsep):
        if root:
            yield Path(os.path.expanduser(root)) / kind
    yield PACKAGE / FOLDERS[kind]
    if kind == "tasks":
        yield PACKAGE / SUBCOMMANDS


@cache
def _list_plug_in_files(folder: Path, kind: str) -> dict[str, Path]:
    """Plug-in files in `folder` by normalized name."""
    if not folder.is_dir():
        return {}
    found: dict[str, Path] = {}
    wanted = ".yaml" if kind in DATA_KINDS else ".py"
    for name in sorted(os.listdir(folder)):
        if name.startswith(("_", ".")):
            continue
        stem, suffix = os.path.splitext(name)
        entry = folder / name
        if suffix == wanted:
            found[_normalize_name(stem)] = entry
        elif kind == "tasks" and entry.is_dir():
            found |= {
                f"{_normalize_name(name)} {key}": file for key, file in _list_plug_in_files(entry, "group").items()
            }
        elif (entry / "__init__.py").exists():
            found[_normalize_name(name)] = entry / "__init__.py"
    return found


def _find_entry_point(kind: str, name: str) -> EntryPoint:
    return next(
        point for key, point in _list_entry_points(kind).items() if _normalize_name(key) == _normalize_name(name)
    )


@cache
def _list_entry_points(kind: str) -> dict[str, EntryPoint]:
    """Entry points of the group ``primus.<kind>`` by the name that users type; a dot stands for a space."""
    if not _has_entry_points():
        return {}
    from importlib.metadata import entry_points

    return {
        point.name.lower().replace(".", " ").replace("_", "-"): point for point in entry_points(group=f"primus.{kind}")
    }


@cache
def _has_entry_points() -> bool:
    """Whether any installed package provides plug-ins; reading the files takes 2 ms, importlib.metadata 50 ms."""
    for folder in sys.path:
        with contextlib.suppress(OSError):
            for name in os.listdir(folder or "."):
                if name.endswith((".dist-info", ".egg-info")) and _declares_plug_ins(os.path.join(folder, name)):
                    return True
    return False


def _declares_plug_ins(package: str) -> bool:
    try:
        with open(os.path.join(package, "entry_points.txt"), "rb") as text:
            return b"[primus." in text.read()
    except OSError:
        return False
