"""Find where an engine is installed: in its environment, in a checkout, or in the environment of primus."""

from __future__ import annotations

import hashlib
import os
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

import msgspec
from msgspec import Struct

from primus import package_files
from primus.engines.requirement import EnginePackages, EngineRequirement
from primus.site_folders import find_module_folder, find_version, list_import_folders

FOLDER_VARIABLE = "PRIMUS_ENGINES"
"""Variable that names the folder of the environments, for example on a shared file system."""
RECORD_FILE = "primus-engine.json"
"""File in an environment that `setup --engine` has made: what it holds. Other environments are the user's own."""

Place = Literal["environment", "checkout", "main environment"]


class EnvironmentRecord(Struct, frozen=True, kw_only=True):
    """What an environment holds, in `primus-engine.json`."""

    engine: str
    packages: EnginePackages
    """What it was made from; other packages than those of the engine's file mean that it is outdated."""
    shared: tuple[str, ...]
    """Folders of the packages that it shares."""


class EngineInstallation(Struct, frozen=True, kw_only=True):
    """An installed engine, and the interpreter that imports it."""

    engine: str
    """Name of the engine: ``torchtitan``."""
    place: Place
    python: str
    """Interpreter that starts the workers."""
    version: str | None
    """None if the package does not state its version in a file."""
    folder: str
    """Folder that holds the package."""

    def format_place(self) -> str:
        """`in the environment PATH`, for messages."""
        if self.place == "checkout":
            return f"in the checkout {self.folder}"
        where = Path(self.python).parent.parent if self.place == "environment" else self.folder
        return f"in the {self.place} {where}"


def find_environment_folder(environ: Mapping[str, str]) -> Path:
    """Folder that holds an environment for each engine.

    `$PRIMUS_ENGINES`; else `engines` in the main environment of a checkout; else a folder of the main environment in
    the user's data folder ($XDG_DATA_HOME, XDG Base Directory Specification), since installers replace the environment
    of an installed package as a whole.
    """
    named = environ.get(FOLDER_VARIABLE)
    if named:
        return Path(os.path.expanduser(named)).absolute()
    if package_files.CHECKOUT is not None:
        return Path(sys.prefix) / "engines"
    # Several versions of primus may be installed side by side: each shares its own packages with its engines.
    own = f"{Path(sys.prefix).name}-{hashlib.sha256(sys.prefix.encode()).hexdigest()[:8]}"
    return find_data_folder(environ) / "engines" / own


def find_data_folder(environ: Mapping[str, str]) -> Path:
    """The folder below $XDG_DATA_HOME."""
    home = environ.get("XDG_DATA_HOME") or os.path.join(environ.get("HOME") or os.path.expanduser("~"), ".local/share")
    return Path(home) / "primus"


def find_environment_python(name: str, environ: Mapping[str, str]) -> Path:
    """Interpreter of the environment of the engine `name`, whether it exists or not."""
    return find_environment_folder(environ) / name / "bin" / "python"


def find_installation(
    name: str, engine: EngineRequirement, environ: Mapping[str, str], python: str = sys.executable
) -> EngineInstallation | None:
    """The installation of an engine that workers would use; None if it is not installed."""
    return next(iter(list_installations(name, engine, environ, python)), None)


def list_installations(
    name: str, engine: EngineRequirement, environ: Mapping[str, str], python: str = sys.executable
) -> list[EngineInstallation]:
    """All installations of an engine; the first one is used.

    A checkout that a variable names comes first; it runs in the environment of the engine where there is one. Then come
    the environment, and the packages of `python`, such as those of an image.
    """
    environment = find_environment(name, engine, environ)
    own = _find_in(name, engine, "main environment", python, _list_own_path(environ))
    checkout = find_checkout(name, engine, environ, environment.python if environment else python)
    return [each for each in (checkout, environment, own) if each]


def read_record(prefix: Path) -> EnvironmentRecord | None:
    """The record of an environment; None if it was not made by primus."""
    try:
        return msgspec.json.decode((prefix / RECORD_FILE).read_bytes(), type=EnvironmentRecord)
    except (OSError, msgspec.MsgspecError):
        return None


def is_current(prefix: Path, engine: EngineRequirement) -> bool:
    """Whether the environment in `prefix` needs no update: its packages are those of the engine's file, and the shared
    folders are there. An environment of the user's own never needs one."""
    if not os.access(prefix / "bin" / "python", os.X_OK):
        return False
    record = read_record(prefix)
    if record is None:
        return find_module_folder(engine.module, list_import_folders(prefix)) is not None
    wanted = engine.find_packages(find_python_version(prefix / "bin" / "python"))
    return record.packages == wanted and all(os.path.isdir(folder) for folder in record.shared)


def find_environment(name: str, engine: EngineRequirement, environ: Mapping[str, str]) -> EngineInstallation | None:
    """The installation of an engine in its environment; None if it is not there, or shares packages that are gone."""
    own = find_environment_python(name, environ)
    record = read_record(own.parent.parent)
    if record and not all(os.path.isdir(folder) for folder in record.shared):
        return None
    folders = list_import_folders(own.parent.parent) if os.access(own, os.X_OK) else []
    return _find_in(name, engine, "environment", str(own), folders)


def _find_in(
    name: str, engine: EngineRequirement, place: Place, python: str, folders: Sequence[str]
) -> EngineInstallation | None:
    folder = find_module_folder(engine.module, folders)
    if folder is None:
        return None
    version = find_version(engine.package, engine.module, folders)
    return EngineInstallation(engine=name, place=place, python=python, version=version, folder=str(folder))


def list_installation_folders(installation: EngineInstallation) -> list[str]:
    """Import path of the workers that use an installation."""
    prefix = Path(installation.python).parent.parent
    is_own = str(prefix) == sys.prefix
    folders = [entry for entry in sys.path if entry] if is_own else list_import_folders(prefix)
    return list(dict.fromkeys([installation.folder, *folders]))


def find_checkout(
    name: str, engine: EngineRequirement, environ: Mapping[str, str], python: str
) -> EngineInstallation | None:
    """The checkout that a variable names; None if none does."""
    named = [environ[variable] for variable in engine.checkout_variables if environ.get(variable)]
    folders = [os.path.abspath(os.path.join(each, path)) for each in named for path in engine.checkout_paths]
    return _find_in(name, engine, "checkout", python, folders)


def _list_own_path(environ: Mapping[str, str]) -> list[str]:
    """Import path of this interpreter, with the folders of PYTHONPATH that its workers get."""
    named = [each for each in environ.get("PYTHONPATH", "").split(os.pathsep) if each]
    return list(dict.fromkeys([*named, *(entry for entry in sys.path if entry)]))


def read_python_range(folder: Path) -> str | None:
    """The versions of Python that the project in a folder requires, such as ``>=3.12``; None if it does not say."""
    try:
        text = (folder / "pyproject.toml").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    found = re.search(r"^requires-python *= *[\"']([^\"']+)", text, re.MULTILINE)
    return found[1] if found else None


def find_python_version(python: Path) -> str:
    """Version of an interpreter such as ``3.11``, from the names of the files of its environment."""
    if Path(sys.executable) == python:
        return f"{sys.version_info[0]}.{sys.version_info[1]}"
    folders = sorted(python.parent.parent.glob("lib/python3.*"))
    match = re.fullmatch(r"python(3\.\d+)", folders[-1].name) if folders else None
    return match[1] if match else f"{sys.version_info[0]}.{sys.version_info[1]}"
