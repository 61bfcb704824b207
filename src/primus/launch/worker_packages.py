"""Check before a launch that the environment of the workers has the packages that the experiment needs."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from primus.errors import UnfitError
from primus.package_files import PROGRAM
from primus.site_folders import find_module_folder

if TYPE_CHECKING:
    from primus.engines.choice import EngineChoice


def check_worker_packages(names: Sequence[str], engine: EngineChoice | None, workers: Mapping[str, str]) -> None:
    """Check that the workers can import the packages `names`.

    Args:
        names: Packages of trackers.
        engine: Engine whose interpreter starts the workers; None for the interpreter of primus.
        workers: Variables of the workers.

    Raises:
        UnfitError: One is missing; the message names the environment.
    """
    from primus.engines.installation import list_installation_folders  # workers import this file for its message

    if engine and engine.installation is None:  # made before the workers start, which check again
        return
    installation = engine.installation if engine else None
    folders = list_installation_folders(installation) if installation else [entry for entry in sys.path if entry]
    folders = [*workers.get("PYTHONPATH", "").split(os.pathsep), *folders]
    missing = next((name for name in names if find_module_folder(name, folders) is None), None)
    if missing is None:
        return
    is_own = engine is None or installation is None or installation.python == sys.executable
    setup = f"{PROGRAM} setup --with {missing}"
    if engine and installation and installation.place == "environment":
        setup = f"{PROGRAM} setup --engine {engine.name} --with {missing}"
    elif not is_own:
        setup = f"{engine.python if engine else sys.executable} -m pip install {missing}"
    where = engine.python if engine else sys.executable
    raise UnfitError(
        f"{format_missing_package(missing)} in the environment of the workers ({where})",
        f"{setup}, or set disable_{missing}: true",
    )


def format_missing_package(package: str) -> str:
    """The problem in words."""
    return f"disable_{package} is false, but the package {package} is not installed"
