"""Finds plug-ins by name in the folders of `$PRIMUS_PLUGINS`, the package and entry points; imports them on use.

The name of a plug-in is the name of its file, ignoring case; `-` equals `_`. A folder of tasks is the first word of
their names: `tasks/runs/list.py` is the task `runs list`. In every other kind a folder with `__init__.py` is one
plug-in. The folder of a framework also holds plug-ins of other kinds, its parts: `frameworks/nemo/logs.py` is the
plug-in `nemo` of the kind `logs`.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import os
import sys
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from primus import package_files
from primus.contract import ContractT, PlugInKind, complete_module
from primus.errors import PrimusError, UsageError, did_you_mean, format_error_place

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

PACKAGE = package_files.PACKAGE
FOLDERS = {
    "tasks": "tasks",
    "runtimes": "runtimes",
    "frameworks": "frameworks",
    "benchmarks": "benchmarks",
    "callbacks": "callbacks",
    "observers": "observers",
    "rewards": "rewards",
    "patches": "patches",
    "profiles": "machine/profiles",
    "architectures": "machine/architectures",
    "nics": "machine/nics",
    "sources": "data/sources",
    "models": "presets/models",
    "trainers": "presets/trainers",
    "images": "presets/images",
}
"""Folder in the package that holds the plug-ins of each kind."""

PARTS = {
    "checkpoints": "checkpoint.py",
    "engines": "packages.yaml",
    "exports": "export_file.py",
    "imports": "import_file.py",
    "logs": "logs.py",
    "translations": "translation.py",
    "variables": "variables.py",
    "weights": "weights.yaml",
}
"""File in the folder of a framework that is a plug-in of each kind, under the name of the framework."""

OLDER_FOLDERS = {"frameworks": "backends", "variables": "frameworks"}
"""Folder in which users of older versions have single files of a kind."""

SUBCOMMANDS = "cli/subcommands"
"""Folder of tasks in a checkout where users of AMD-AGI/Primus put theirs; see `primus.cli.registry`."""

DATA_KINDS = frozenset({"models", "trainers", "engines", "images", "profiles", "architectures", "nics", "weights"})
"""Kinds whose plug-ins are YAML files."""

MOVED_MODULES = {
    "primus.backend": "primus.framework",
    "primus.launch.plan": "primus.plan (RemoteLaunch, JobState and Submission: primus.runtime)",
    "primus.model": "primus.models.counts (load_model: primus.config.extended_files)",
    "primus.model_checks": "primus.models.model_checks",
    "primus.model_layers": "primus.models.layers",
}
"""Modules that plug-ins of older versions import, and where their contents are."""

PLUG_IN_MODULES = "primus_plugins"
"""Package name under which files of the user are imported."""

SINGULAR = {kind: kind.removesuffix("s") for kind in (*FOLDERS, *PARTS)} | {"patches": "patch"}


def list_plug_ins(kind: str) -> list[str]:
    """Names of all plug-ins of a `kind` as users type them, sorted; a task in a folder is ``"folder name"``."""
    names = {_format_typed_name(kind, file) for file in _index_files(kind).values()}
    return sorted(names | set(_list_entry_points(kind)))


def find_plug_in_file(kind: str, name: str) -> Path | None:
    """File of the plug-in `name`; None if an entry point provides it.

    Raises:
        UsageError: The plug-in does not exist; the message names the nearest.
    """
    if found := _index_files(kind).get(_normalize_name(name)):
        return found
    if _normalize_name(name) in map(_normalize_name, _list_entry_points(kind)):
        return None
    raise UsageError(f"no {SINGULAR[kind]} '{name}'", did_you_mean(name, list_plug_ins(kind)))


def has_plug_in(kind: str, name: str) -> bool:
    """Whether there is a plug-in `name` of a `kind`."""
    key = _normalize_name(name)
    return key in _index_files(kind) or key in map(_normalize_name, _list_entry_points(kind))


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
        _note_older_folder(kind.name, file)
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
    roots = _split_folders(os.environ.get("PRIMUS_PLUGINS", ""))
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
        place = MOVED_MODULES.get(error.name or "") if isinstance(error, ModuleNotFoundError) else None
        raise PrimusError(
            f"{label} cannot be loaded: {format_error_place(error)}: {type(error).__name__}: {error}",
            f"import {place}, where its contents are now" if place else "",
        ) from error


def _load_file(kind: str, name: str, file: Path) -> ModuleType:
    module_name = f"{PLUG_IN_MODULES}.{kind}.{_normalize_name(name).replace(' ', '.')}"
    if file.name == PARTS.get(kind):  # a module of the framework's package, so that its parts can share modules
        return importlib.import_module(f"{_load_package('frameworks', file.parent)}.{file.stem}")
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


def _load_package(kind: str, folder: Path) -> str:
    """Import the package of a user's plug-in, and give its name; one without `__init__.py` is empty."""
    if (folder / "__init__.py").exists():
        return _load_file(kind, folder.name, folder / "__init__.py").__name__
    package = ModuleType(f"{PLUG_IN_MODULES}.{kind}.{_normalize_name(folder.name)}")
    package.__path__ = [str(folder)]
    return sys.modules.setdefault(package.__name__, package).__name__


@cache
def _note_older_folder(kind: str, file: Path) -> None:
    """Say once, in the launcher, where a plug-in of an older version belongs now."""
    folder = file.parent.parent if file.name == "__init__.py" else file.parent
    if folder.name == OLDER_FOLDERS.get(kind) and "LOCAL_RANK" not in os.environ:
        print(f"primus-cli: {file}: the place of this plug-in is the folder {kind}/ now", file=sys.stderr)


def _normalize_name(name: str) -> str:
    return name.lower().replace("-", "_").removesuffix(".yaml")


def _format_typed_name(kind: str, file: Path) -> str:
    if file.name == PARTS.get(kind):
        return file.parent.name.lower().replace("_", "-")
    if kind in DATA_KINDS:
        return file.stem
    plug_in = file.parent if file.name == "__init__.py" else file
    in_group = kind == "tasks" and plug_in.parent.name != "tasks"
    return (f"{plug_in.parent.name} {plug_in.stem}" if in_group else plug_in.stem).lower().replace("_", "-")


def _index_files(kind: str) -> Mapping[str, Path]:
    """Plug-in files by normalized name."""
    return _index_folders(kind, os.environ.get("PRIMUS_PLUGINS", ""))


@cache
def _index_folders(kind: str, plugins: str) -> dict[str, Path]:
    """Those in the folders `plugins`, and in the package; a user's file replaces one of the package."""
    found: list[dict[str, Path]] = []
    for root in (*_split_folders(plugins), PACKAGE):
        found.append(_list_plug_in_files(root / (FOLDERS.get(kind, kind) if root == PACKAGE else kind), kind))
        if kind in PARTS:
            found.append(_list_parts(root / "frameworks", PARTS[kind]))
        if kind == "patches":
            found += [_list_plug_in_files(folder, kind) for folder in sorted((root / "frameworks").glob("*/patches"))]
        if kind in OLDER_FOLDERS and root != PACKAGE:
            found.append(_list_plug_in_files(root / OLDER_FOLDERS[kind], kind))
    if kind == "tasks":
        found.append(_list_plug_in_files(PACKAGE / SUBCOMMANDS, kind))
    return {name: file for files in reversed(found) for name, file in files.items()}


def _split_folders(plugins: str) -> list[Path]:
    return [Path(os.path.expanduser(root)) for root in plugins.split(os.pathsep) if root]


def _list_parts(folder: Path, part: str) -> dict[str, Path]:
    """The file `part` of each framework that has one, by normalized name."""
    names = sorted(os.listdir(folder)) if folder.is_dir() else []
    files = {_normalize_name(name): folder / name / part for name in names if not name.startswith(("_", "."))}
    return {name: file for name, file in files.items() if os.path.exists(file)}


def _has_part(file: Path, kind: str) -> bool:
    """Whether a single file is a plug-in of this kind: in `frameworks`, older versions had files of variables."""
    if file.parent.name != "frameworks" or kind not in OLDER_FOLDERS:
        return True
    text = file.read_bytes()
    has_variables = b"def list_settings" in text
    return has_variables if kind == "variables" else b"train" in text or not has_variables


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
            if _has_part(entry, kind):
                found[_normalize_name(stem)] = entry
        elif kind == "tasks" and entry.is_dir():
            found |= {
                f"{_normalize_name(name)} {key}": file for key, file in _list_plug_in_files(entry, "group").items()
            }
        elif kind not in PARTS and (entry / "__init__.py").exists():
            found[_normalize_name(name)] = entry / "__init__.py"
    return found


def _find_entry_point(kind: str, name: str) -> EntryPoint:
    return next(
        point for key, point in _list_entry_points(kind).items() if _normalize_name(key) == _normalize_name(name)
    )


@cache
def _list_entry_points(kind: str) -> dict[str, EntryPoint]:
    """Entry points of the group ``primus.<kind>`` by the name that users type; a dot stands for a space.

    An entry point for a framework whose package has a part is one for that part, too.
    """
    if not _has_entry_points():
        return {}
    from importlib.metadata import EntryPoint, entry_points

    groups = ("primus.backends", "primus.frameworks") if kind == "frameworks" else (f"primus.{kind}",)
    found = [point for group in groups for point in entry_points(group=group)]
    if kind in PARTS:
        found += [
            EntryPoint(point.name, f"{point.value}.{os.path.splitext(PARTS[kind])[0]}", f"primus.{kind}")
            for point in _list_entry_points("frameworks").values()
            if _has_module(point.value, PARTS[kind])
        ]
    return {point.name.lower().replace(".", " ").replace("_", "-"): point for point in found}


def _has_module(package: str, file: str) -> bool:
    """Whether a package has a file; the package is not imported."""
    try:
        spec = importlib.util.find_spec(package)
    except (ImportError, ValueError):
        return False
    folders = (spec and spec.submodule_search_locations) or ()
    return any(os.path.exists(os.path.join(folder, file)) for folder in folders)


@cache
def _has_entry_points() -> bool:
    """Whether any installed package provides plug-ins; reading the files takes 2 ms, importlib.metadata 50 ms."""
    for folder in sys.path:
        with contextlib.suppress(OSError):
            for name in os.listdir(folder or "."):
                if name.endswith((".dist-info", ".egg-info")):
                    with (
                        contextlib.suppress(OSError),
                        open(os.path.join(folder, name, "entry_points.txt"), "rb") as text,
                    ):
                        if b"[primus." in text.read():
                            return True
    return False
