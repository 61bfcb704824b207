"""List the training engines: version, place, and the command that installs those that are missing."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping

from msgspec import Struct

from primus import __version__
from primus.engines.installation import (
    EngineInstallation,
    find_environment_folder,
    is_current,
    list_installation_folders,
    list_installations,
)
from primus.engines.requirement import EngineRequirement, list_engines
from primus.package_files import PROGRAM
from primus.patch import includes_version
from primus.report import table
from primus.site_folders import find_module_folder, find_version
from primus.task import TaskContext

SHARED_VARIABLES = ("BACKEND_PATH", "PRIMUS_PATH")
"""Variables that may name the checkout of another engine."""


class Options(Struct, frozen=True, kw_only=True):
    """Options of `engines`."""


class EngineStatus(Struct, frozen=True, kw_only=True):
    """An engine on this machine; one that is installed several times is listed as often, the one that is used first."""

    engine: str
    title: str
    installed: bool
    used: bool
    """Whether workers would use this installation."""
    version: str | None
    supported: str
    """Range of supported versions."""
    place: str | None
    python: str | None
    """Interpreter of its workers."""
    remedy: str
    """What to type, or why it cannot be used; empty if nothing is missing."""


def run(options: Options, context: TaskContext) -> None:
    """Print a line for each installation, and one for each engine that is not installed."""
    found = [_describe_native()]
    for name, engine in list_engines().items():
        found += _describe_engine(name, engine, context.environ)
    rows = [
        [each.engine, each.version or ("?" if each.installed else "-"), each.supported, each.place or "-", each.remedy]
        for each in found
    ]
    context.result(found, table.format_table(["engine", "version", "supported", "where", "to do"], rows))


def _describe_native() -> EngineStatus:
    """The framework of primus itself, which needs PyTorch."""
    path = [entry for entry in sys.path if entry]
    folder = find_module_folder("torch", path)
    torch = find_version("torch", "torch", path)
    return EngineStatus(
        engine="native",
        title="native",
        installed=folder is not None,
        used=folder is not None,
        version=__version__,
        supported=__version__,
        place=f"PyTorch {torch} in {folder}" if folder else None,
        python=sys.executable,
        remedy="" if folder else f"{PROGRAM} setup installs PyTorch (docs/install.md)",
    )


def _describe_engine(name: str, engine: EngineRequirement, environ: Mapping[str, str]) -> Iterator[EngineStatus]:
    found = list_installations(name, engine, environ)
    for index, each in enumerate(found or [None]):
        remedy = _find_remedy(name, engine, each, environ) if index == 0 else f"not used: {found[0].place} comes first"
        yield EngineStatus(
            engine=name,
            title=engine.title,
            installed=each is not None,
            used=each is not None and index == 0,
            version=each.version if each else None,
            supported=engine.versions,
            place=each.format_place().removeprefix("in the ") if each else None,
            python=each.python if each else None,
            remedy=remedy,
        )


def _find_remedy(
    name: str, engine: EngineRequirement, found: EngineInstallation | None, environ: Mapping[str, str]
) -> str:
    install = f"{PROGRAM} setup --engine {name}" if engine.python else engine.remedy
    if found is None:
        named = [each for each in engine.checkout_variables if environ.get(each)]
        wrong = [f"{each} names no checkout of {engine.title}" for each in named if each not in SHARED_VARIABLES]
        return "; ".join([*wrong, install])
    if found.version and not includes_version(engine.versions, found.version):
        return f"not supported: {install}, or try it with --allow-version"
    folders = list_installation_folders(found)
    missing = [module for module in engine.needs if find_module_folder(module, folders) is None]
    if missing:
        return f"{', '.join(missing)} cannot be imported by {found.python}"
    if found.place == "environment" and not is_current(find_environment_folder(environ) / name, engine):
        return f"its pins have changed: {install}"
    return ""
