"""Make the environment of an engine that is not available for the Python of primus, by another one that is installed.

FOLDER/.python3.12   a second main environment: primus, PyTorch and what they require; engines of this Python share it
FOLDER/NAME          the environment of the engine, made by `setup --engine NAME` of that second environment
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from primus import package_files
from primus.bootstrap.install import WISH_FILE
from primus.engines.installation import FOLDER_VARIABLE, find_environment_folder
from primus.engines.requirement import EngineRequirement
from primus.errors import UnfitError
from primus.process import read_output

REPORT_VERSION = "import sys; print('%d.%d' % sys.version_info[:2])"
PREFIX = "primus-cli: "

Say = Callable[[str], None]


def find_interpreter(engine: EngineRequirement, environ: Mapping[str, str]) -> tuple[str, str] | None:
    """Version and path of the first interpreter that the engine is available for; None if there is none.

    `$PRIMUS_PYTHON` counts first, then `python3.N` on PATH, then the installations of pyenv and uv.
    """
    versions = engine.list_python_versions()
    named = environ.get("PRIMUS_PYTHON")
    candidates = [named] if named else []
    candidates += [path for version in versions for path in _list_candidates(version, environ)]
    for candidate in dict.fromkeys(candidates):
        # A shim of pyenv is on PATH also where no such version is selected: only running it shows that.
        found = read_output([candidate, "-I", "-S", "-c", REPORT_VERSION])
        if found in versions:
            return found, shutil.which(candidate, path=environ.get("PATH")) or candidate
    return None


def _list_candidates(version: str, environ: Mapping[str, str]) -> Iterator[str]:
    home = Path(environ.get("HOME") or Path.home())
    data = Path(environ.get("XDG_DATA_HOME") or home / ".local/share")
    for folder in environ.get("PATH", "").split(os.pathsep):
        path = os.path.join(folder, f"python{version}")
        if folder and os.access(path, os.X_OK):
            yield path
    # https://github.com/pyenv/pyenv#locating-pyenv-provided-python-installations
    pyenv = Path(environ.get("PYENV_ROOT") or home / ".pyenv")
    yield from map(str, sorted(pyenv.glob(f"versions/{version}.*/bin/python")))
    # https://docs.astral.sh/uv/reference/storage/#python-versions
    uv = Path(environ.get("UV_PYTHON_INSTALL_DIR") or data / "uv/python")
    yield from map(str, sorted(uv.glob(f"cpython-{version}.*/bin/python{version}")))


def require_interpreter(engine: EngineRequirement, environ: Mapping[str, str]) -> tuple[str, str]:
    """As `find_interpreter`.

    Raises:
        UnfitError: There is none; says what to install.
    """
    found = find_interpreter(engine, environ)
    if found is None:
        versions = engine.list_python_versions()
        own = f"{sys.version_info[0]}.{sys.version_info[1]}"
        first = versions[0]
        raise UnfitError(
            f"{engine.title} needs Python {' or '.join(versions)}; primus runs on {own}, and no other one was found",
            f"install one (uv python install {first}; Debian, Ubuntu: apt install python{first}-venv), or name it:"
            f" PRIMUS_PYTHON=/path/to/python{first}",
        )
    return found


def describe_change(name: str, engine: EngineRequirement, environ: Mapping[str, str]) -> list[str]:
    """What `make_environment` would do, for a dry run."""
    version, python = require_interpreter(engine, environ)
    folder = find_environment_folder(environ)
    wanted = engine.find_packages(version)
    assert wanted is not None
    base = _find_base(folder, version)
    return [
        f"{engine.title}: makes, or updates, the environment {base} of Python {version} ({python}), with its PyTorch",
        f"{engine.title}: makes the environment {folder / name}, which shares it",
        f"{engine.title}: installs {wanted.describe(wanted.packages)} (about {wanted.download_mb} MB)",
    ]


def make_environment(name: str, engine: EngineRequirement, environ: Mapping[str, str], say: Say) -> None:
    """Make the second main environment, and let its `setup --engine NAME` make that of the engine.

    Raises:
        UnfitError: No interpreter was found, or one of the two could not be made; the message is that of its maker.
    """
    if package_files.CHECKOUT is None:
        versions = " or ".join(engine.list_python_versions())
        raise UnfitError(
            f"{engine.title} needs Python {versions}, for which an installed package of primus makes no environment",
            f"install primus for such a Python, or run ./primus-cli setup --engine {name} in a clone",
        )
    version, python = require_interpreter(engine, environ)
    folder = find_environment_folder(environ)
    say(f"{engine.title} is not available for the Python of {sys.prefix}: using Python {version}, {python}")
    # Names packages of this Python, which another one cannot import.
    child = {key: value for key, value in environ.items() if key != "PYTHONPATH"}
    child |= {"PRIMUS_VENV": str(_find_base(folder, version)), "PRIMUS_PYTHON": python, FOLDER_VARIABLE: str(folder)}
    wish = Path(sys.prefix) / WISH_FILE
    if wish.is_file() and not child.get("PRIMUS_TORCH"):
        child["PRIMUS_TORCH"] = wish.read_text(encoding="utf-8").strip()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UnfitError(
            f"{folder} cannot be created: {error.strerror}", f"name another folder: {FOLDER_VARIABLE}=~/primus-engines"
        ) from None
    _run_setup([str(package_files.CHECKOUT / "primus-cli"), "setup", "--engine", name], child, engine, say)


def _find_base(folder: Path, version: str) -> Path:
    return folder / f".python{version}"


def _run_setup(command: list[str], environ: Mapping[str, str], engine: EngineRequirement, say: Say) -> None:
    """Run a setup, and print its progress as it comes.

    Raises:
        UnfitError: It failed; the error is what it printed last.
    """
    process = subprocess.Popen(
        command,
        env=environ,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
    )
    # A message is a line, and indented lines that say what to do. The last one is held back, as it may be the error.
    held: list[str] = []
    with process:
        try:
            for line in process.stderr or ():
                if held and not line.startswith(" "):
                    say("\n".join(held))
                    held.clear()
                held.append(line.rstrip().removeprefix(PREFIX))
            code = process.wait()
        finally:
            # Also after Ctrl-C: an installer must not write into a folder that is being removed.
            if process.poll() is None:
                process.kill()
    if code:
        problem, *hints = held or [f"setup of {engine.title} ended with exit code {code}"]
        raise UnfitError(problem, "\n".join(hints).strip())
    if held:
        say("\n".join(held))
