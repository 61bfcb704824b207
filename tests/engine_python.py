"""Interpreters of engines for tests, which skip where an engine is not installed.

    @pytest.mark.engine("torchtitan")    skips a test, or with `pytestmark` a file
    engine_python("torchtitan")      the interpreter that imports TorchTitan, or the test is skipped
    build_command("torchtitan", f)   what runs the script f by it
    run_engine("torchtitan", code)   runs code by it, with this checkout's primus; gives the standard output

`./primus-cli setup --engine torchtitan` installs one; $PRIMUS_ENGINES names the folder of environments to share.
"""

from __future__ import annotations

import os
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from primus.engines.installation import FOLDER_VARIABLE, EngineInstallation, find_installation
from primus.engines.requirement import read_engine
from primus.patch import includes_version

SOURCE = Path(__file__).parent.parent / "src"

XLA_FLAGS = "--xla_backend_optimization_level=0 --xla_cpu_use_fusion_emitters=false"
"""Compiles in 30 % of the time; the programs of tests are run only a few times."""

SHARED = {name: os.environ[name] for name in (FOLDER_VARIABLE,) if os.environ.get(name)}
"""The developer's folder of environments; conftest.py hides the variables of the shell from the tests."""


def find_engine(name: str) -> EngineInstallation | None:
    """The installation of an engine whose version is supported; None where there is none."""
    engine = read_engine(name)
    found = find_installation(name, engine, SHARED)
    return found if found and found.version and includes_version(engine.versions, found.version) else None


@cache
def why_not_installed(name: str) -> str:
    """Why the tests of an engine cannot run here; empty where they can."""
    return "" if find_engine(name) else f"{name} is not installed: ./primus-cli setup --engine {name}"


def engine_python(name: str) -> str:
    """The interpreter that imports the engine; skips the test where it is not installed."""
    found = find_engine(name)
    if found is None:
        pytest.skip(why_not_installed(name))
    return found.python


def engine_variables(name: str) -> dict[str, str]:
    """Variables of a process that launches workers of an engine; skips the test where it is not installed."""
    engine_python(name)
    flags = {"XLA_FLAGS": XLA_FLAGS} if name == "jax" else {}
    return {**os.environ, **SHARED, **flags, "PYTHONPATH": str(SOURCE)}


def build_command(name: str, script: Path, *words: str) -> list[str]:
    """What runs a script by the interpreter of an engine; skips the test where it is not installed.

    It collects garbage rarely: importing torch and what an engine needs takes a quarter less processor time.
    """
    code = (
        "import runpy, sys; from primus.interpreter import reduce_garbage_collection; reduce_garbage_collection(); "
        "del sys.argv[0]; runpy.run_path(sys.argv[0], run_name='__main__')"
    )
    return [engine_python(name), "-c", code, str(script), *words]


def run_engine(name: str, code: str, timeout_s: float = 240, **variables: str) -> str:
    """Run code by the interpreter of an engine; gives what it prints."""
    command = [engine_python(name), "-c", f"import gc; gc.disable()\n{code}"]  # it is short
    env = {**engine_variables(name), **variables}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=timeout_s)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


if __name__ == "__main__":
    print(*(f"{name}: {find_engine(name)}" for name in sys.argv[1:]), sep="\n")
