"""Install packages of the user, such as an experiment tracker, beside those of primus or of an engine."""

from __future__ import annotations

import re
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from primus.bootstrap import packages
from primus.engines.environment import read_complaint, run_logged
from primus.errors import UnfitError, UsageError
from primus.messages import Say
from primus.site_folders import find_module_folder, list_import_folders, list_package_versions

REQUIREMENT = re.compile(r"[A-Za-z0-9][\w.-]*(\[[\w,.-]+\])?([=<>!~]=?[\w.*,=<>!~]+)?")
"""A name with a version: no option of the installer, path or address."""


def parse_requirements(words: Sequence[str]) -> tuple[str, ...]:
    """The packages in words that separate them by commas.

    Raises:
        UsageError: One is not the name of a package.
    """
    names = tuple(name for word in words for name in word.split(",") if name)
    for name in names:
        if not REQUIREMENT.fullmatch(name):
            raise UsageError(f"setup: --with {name}: not the name of a package", "such as wandb or wandb==0.19.1")
    return names


def install_extra_packages(python: str, names: Sequence[str], say: Say) -> None:
    """Install `names` into the environment of `python`; what is there keeps its version.

    Raises:
        UnfitError: The installer fails; the message has its last error.
    """
    prefix = Path(python).parent.parent
    folders = [entry for entry in sys.path if entry] if python == sys.executable else list_import_folders(prefix)
    uv = packages.find_uv() or (None if find_module_folder("pip", folders) else shutil.which("uv"))
    with tempfile.TemporaryDirectory(prefix="primus-setup-") as folder, (Path(folder) / "log").open("w+") as log:
        constraints = Path(folder) / "constraints.txt"
        fixed = list_package_versions(folders)
        constraints.write_text("".join(f"{name}=={version}\n" for name, version in fixed.items()))
        words = ["--constraint", str(constraints), *names]
        command, environ = packages.build_install_command(python, words, packages.read_pip_config(), uv)
        environ.setdefault("PIP_RETRIES", "1")
        say(f"installing {', '.join(names)} into {prefix}")
        if run_logged(command, log, environ, say):
            raise UnfitError(f"{', '.join(names)} cannot be installed: {read_complaint(log)}", f"into {prefix}")
