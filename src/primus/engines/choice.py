"""Choose the engine and the interpreter for the workers of a job, and check the version of the engine."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from msgspec import Struct

from primus.engines.installation import (
    EngineInstallation,
    find_checkout,
    find_environment_folder,
    find_environment_python,
    find_installation,
    find_python_version,
    is_current,
    read_python_range,
)
from primus.engines.other_python import require_interpreter
from primus.engines.requirement import EngineRequirement, list_engines, read_engine
from primus.errors import UnfitError, UsageError
from primus.package_files import PROGRAM
from primus.patch import includes_version
from primus.plan import Action

INSTALL_TIMEOUT_S = 1800.0
"""Time to make the environment of an engine: a node may download it, or wait for one that does."""
INSTALL_VARIABLE = "PRIMUS_INSTALL_ENGINES"
"""Variable that decides whether a launch makes the environment of an engine that is not installed: auto (the default)
or never."""

PRIMUS_VARIABLE = "PRIMUS_PATH"
"""Variable of a checkout of Primus, whose folder third_party may be empty."""


class EngineChoice(Struct, frozen=True, kw_only=True):
    """The engine that a job uses."""

    name: str
    requirement: EngineRequirement
    python: str
    """Interpreter of the workers."""
    installation: EngineInstallation | None
    """None if the environment is made before the workers start."""
    note: str
    """Engine, version and place in one line."""

    def make_action(self) -> Action:
        """The action that makes the environment of an engine that is not installed."""
        prefix = Path(self.python).parent.parent
        return Action(kind="environment", file=str(prefix), timeout_s=INSTALL_TIMEOUT_S)


def choose_engine(
    names: Sequence[str], environ: Mapping[str, str], python: str = sys.executable, *, allows_any_version: bool = False
) -> EngineChoice | None:
    """The first of the engines `names` that is installed in a supported version; touches nothing.

    If none is installed, the first one whose environment can be made.

    Args:
        names: Engines that a framework drives, preferred first; empty for a framework without an engine.
        environ: Variables of the launch.
        python: Interpreter of primus.
        allows_any_version: Whether an engine in another version than the supported ones is used.

    Raises:
        UnfitError: None is installed and none can be made, or the version is not supported; says what to do.
    """
    if not names:
        return None
    engines = {name: read_engine(name) for name in names}
    for name, engine in engines.items():
        _check_variables(name, engine, environ)
    found = [
        _choose_installed(name, engine, place, environ)
        for name, engine in engines.items()
        if (place := find_installation(name, engine, environ, python))
    ]
    supported = [choice for choice in found if _is_supported(choice)]
    if supported:
        return supported[0]
    if found and allows_any_version:
        return found[0]
    if found:
        raise _explain_python(found[0]) or _explain_version(found[0])
    return _choose_new(engines, environ)


def _check_variables(name: str, engine: EngineRequirement, environ: Mapping[str, str]) -> None:
    """Refuse a variable of one engine whose folder has no checkout of it, and a shared one whose folder has none.

    Raises:
        UsageError: It names the variable.
    """
    for variable in engine.checkout_variables:
        given = environ.get(variable)
        if not given or variable == PRIMUS_VARIABLE:
            continue
        is_own = name.upper() in variable
        fitting = {name: engine} if is_own else list_engines()
        if any(_is_checkout(key, each, given) for key, each in fitting.items()):
            continue
        package = engine.module.replace(".", "/")
        wanted = f"{engine.title}: it has no folder {package}" if is_own else "an engine: no package of one is in it"
        raise UsageError(
            f"{variable}={given}: no checkout of {wanted}", f"name the folder that holds {package}, or unset {variable}"
        )


def _is_checkout(name: str, engine: EngineRequirement, folder: str) -> bool:
    return any(
        find_checkout(name, engine, {variable: folder}, sys.executable) for variable in engine.checkout_variables[:1]
    )


def _choose_installed(
    name: str, engine: EngineRequirement, place: EngineInstallation, environ: Mapping[str, str]
) -> EngineChoice:
    version = place.version or "of unknown version"
    note = f"{engine.title} {version} {place.format_place()}"
    if place.version and not includes_version(engine.versions, place.version):
        note += f", which is not one of the supported versions ({engine.versions})"
    elif place.place == "environment" and not is_current(find_environment_folder(environ) / name, engine):
        note += f"; its pins have changed: {PROGRAM} setup --engine {name} updates it"
    return EngineChoice(name=name, requirement=engine, python=place.python, installation=place, note=note)


def _is_supported(choice: EngineChoice) -> bool:
    """Whether the version is supported; a package that does not state its version is tried."""
    version = choice.installation.version if choice.installation else None
    is_in_range = version is None or includes_version(choice.requirement.versions, version)
    return is_in_range and _explain_python(choice) is None


def _explain_python(choice: EngineChoice) -> UnfitError | None:
    """The error of a checkout that needs another Python than its interpreter; None if it does not."""
    place = choice.installation
    wanted = read_python_range(Path(place.folder)) if place else None
    if place is None or wanted is None:
        return None
    version = find_python_version(Path(place.python))
    if includes_version(wanted, version):
        return None
    return UnfitError(
        f"{choice.requirement.title} {place.version or ''} {place.format_place()} needs Python {wanted}, and"
        f" {place.python} is {version}",
        f"create both environments with such a Python: PRIMUS_PYTHON=PATH {PROGRAM} setup --engine {choice.name};"
        " to try this one, add --allow-version",
    )


def _explain_version(choice: EngineChoice) -> UnfitError:
    assert choice.installation
    installed = f"{choice.requirement.title} {choice.installation.version} {choice.installation.format_place()}"
    update = f"{PROGRAM} setup --engine {choice.name} installs a supported version"
    remedy = update if choice.requirement.python else choice.requirement.remedy
    return UnfitError(
        f"{installed} is not supported: the framework needs {choice.requirement.versions}",
        f"{remedy}; to try this one, add --allow-version",
    )


def _choose_new(engines: Mapping[str, EngineRequirement], environ: Mapping[str, str]) -> EngineChoice:
    version = f"{sys.version_info[0]}.{sys.version_info[1]}"
    possible = [name for name, engine in engines.items() if engine.find_packages(version)]
    possible += [name for name, engine in engines.items() if engine.python and name not in possible]
    if not possible:
        raise UnfitError(f"{next(iter(engines.values())).title} is not installed", next(iter(engines.values())).remedy)
    name, wish = possible[0], environ.get(INSTALL_VARIABLE) or "auto"
    if wish not in ("auto", "never"):
        raise UsageError(f"{INSTALL_VARIABLE}={wish}: invalid value", "use auto or never")
    if wish == "never":
        raise UnfitError(
            f"{engines[name].title} is not installed, and {INSTALL_VARIABLE}=never",
            f"install it: {PROGRAM} setup --engine {name}",
        )
    if engines[name].find_packages(version) is None:
        require_interpreter(engines[name], environ)
    new = find_environment_python(name, environ)
    note = f"{engines[name].title} is not installed: setup makes its environment {new.parent.parent} first"
    return EngineChoice(name=name, requirement=engines[name], python=str(new), installation=None, note=note)
