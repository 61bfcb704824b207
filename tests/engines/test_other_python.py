"""An engine that is not available for the Python of primus gets an environment of another interpreter."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from fakes import cli
from fakes.engine_wheels import make_engine_wheels, offline_variables, write_engine_plug_ins
from primus.engines.environment import list_changes
from primus.engines.other_python import find_interpreter
from primus.engines.requirement import PYTHON_VERSIONS, EnginePackages, EngineRequirement
from primus.errors import UnfitError
from primus.package_files import CHECKOUT
from primus.site_folders import list_package_versions

OWN = f"{sys.version_info[0]}.{sys.version_info[1]}"
OTHER = "3.12" if OWN != "3.12" else "3.13"
ENGINE = EngineRequirement(
    title="Small",
    module="small.core",
    package="small-core",
    versions=">=1,<2",
    python={f"=={OTHER}.*": EnginePackages(packages=("small-core==1.2", "small-base==2.0"), with_requirements=False)},
)


def make_python(path: Path, version: str) -> Path:
    """An interpreter that says that it is `version`, and cannot create environments."""
    path.parent.mkdir(parents=True, exist_ok=True)
    rest = f'*-m\\ venv*) exit 9 ;; *) exec {sys.executable} "$@" ;;'
    path.write_text(f"#!/bin/sh\ncase $* in *version_info*) echo {version} ;; {rest} esac\n")
    path.chmod(0o755)
    return path


def test_an_interpreter_is_found_on_the_path_and_in_the_folders_of_pyenv_and_uv(tmp_path: Path) -> None:
    environ = {"HOME": str(tmp_path), "PATH": f"{tmp_path}/shims:{tmp_path}/bin"}
    assert find_interpreter(ENGINE, environ) is None
    make_python(tmp_path / f"bin/python{OWN}", OWN)
    shim = make_python(tmp_path / f"shims/python{OTHER}", "")  # pyenv's, where no such version is selected
    assert find_interpreter(ENGINE, environ) is None
    uv = make_python(tmp_path / f".local/share/uv/python/cpython-{OTHER}.4-linux-x86_64-gnu/bin/python{OTHER}", OTHER)
    assert find_interpreter(ENGINE, environ) == (OTHER, str(uv))
    pyenv = make_python(tmp_path / f".pyenv/versions/{OTHER}.1/bin/python", OTHER)
    assert find_interpreter(ENGINE, environ) == (OTHER, str(pyenv))
    on_path = make_python(tmp_path / f"bin/python{OTHER}", OTHER)
    assert find_interpreter(ENGINE, environ) == (OTHER, str(on_path)) and shim.exists()
    named = make_python(tmp_path / "named", OTHER)
    assert find_interpreter(ENGINE, environ | {"PRIMUS_PYTHON": str(named)}) == (OTHER, str(named))
    assert find_interpreter(ENGINE, environ | {"PRIMUS_PYTHON": sys.executable}) == (OTHER, str(on_path))


def test_without_an_interpreter_the_message_says_what_to_install(tmp_path: Path) -> None:
    environ = {"HOME": str(tmp_path), "PATH": "", "PRIMUS_ENGINES": str(tmp_path / "engines")}
    with pytest.raises(UnfitError) as error:
        list_changes("small", ENGINE, environ)
    assert f"Small needs Python {OTHER}; primus runs on {OWN}" in error.value.problem
    assert f"uv python install {OTHER}" in error.value.hint and "PRIMUS_PYTHON=" in error.value.hint
    assert not (tmp_path / "engines").exists()


def write_engine(folder: Path) -> None:
    write_engine_plug_ins(folder)
    file = folder / "engines/small.yaml"
    text = file.read_text().replace('">=3.10":', f'"=={OTHER}.*":')
    file.write_text(text.replace("    pins:", "    with_requirements: false\n    pins:"))


def test_a_dry_run_names_both_environments_and_a_failure_is_that_of_the_interpreter(tmp_path: Path) -> None:
    """The bootstrap is the real one, and the interpreter cannot create environments."""
    write_engine(tmp_path / "plug-ins")
    env = offline_variables(tmp_path / "wheels", tmp_path / "plug-ins", tmp_path / "engines")
    env |= {"PRIMUS_PYTHON": str(make_python(tmp_path / f"python{OTHER}", OTHER)), "PRIMUS_INSTALLER": "pip"}
    env["PATH"] = "/usr/bin:/bin"  # uv would ask the interpreter for the one behind it
    planned = cli.run("--dry-run", "setup", "--engine", "small", cwd=tmp_path, **env)
    assert planned.returncode == 0, planned.stderr
    assert f"{tmp_path}/engines/.python{OTHER} of Python {OTHER}" in planned.stdout
    assert "small-core==1.2 and 0 other packages" in planned.stdout and not (tmp_path / "engines").exists()
    done = cli.run("setup", "--engine", "small", cwd=tmp_path, timeout_s=60, **env)
    assert done.returncode == 3 and "Traceback" not in done.stderr, done.stderr
    assert "cannot create environments" in done.stderr and f"using Python {OTHER}" in done.stderr
    assert not (tmp_path / "engines/small").exists() and not (tmp_path / f"engines/.python{OTHER}").exists()


def find_environment_of_another_python() -> tuple[str, Path] | None:
    """A complete main environment of this checkout: `.venv-python3.13` of tests/newer_python.sh, or `.venv` there."""
    for folder in sorted((CHECKOUT or Path()).glob(".venv*")):
        for version in PYTHON_VERSIONS:
            if version != OWN and (folder / f"lib/python{version}").is_dir() and (folder / "primus-complete").is_file():
                return version, folder
    return None


@pytest.mark.slow
def test_the_engine_is_installed_by_the_other_interpreter_without_its_requirements(tmp_path: Path) -> None:
    found = find_environment_of_another_python()
    if found is None:
        pytest.skip("no environment of another Python: sh tests/newer_python.sh makes one")
    version, base = found
    make_engine_wheels(tmp_path / "wheels", "1.2", "import primus, msgspec")
    (tmp_path / "wheels/small_base-2.5-py3-none-any.whl").unlink()
    write_engine(tmp_path / "plug-ins")
    file = tmp_path / "plug-ins/engines/small.yaml"
    text = file.read_text().replace(f"=={OTHER}.*", f"=={version}.*")
    file.write_text(
        text.replace("[small-core==1.2]", "[small-core==1.2, small-base==2.0]").replace(
            "    pins: [small-base==2.0]\n", ""
        )
    )
    (tmp_path / "engines").mkdir()
    (tmp_path / f"engines/.python{version}").symlink_to(base)
    env = offline_variables(tmp_path / "wheels", tmp_path / "plug-ins", tmp_path / "engines")
    env |= {"PRIMUS_PYTHON": str(base / "bin/python"), "PRIMUS_INSTALLER": "pip"}
    done = cli.run("setup", "--engine", "small", cwd=tmp_path, timeout_s=120, **env)
    assert done.returncode == 0, done.stderr
    site = tmp_path / f"engines/small/lib/python{version}/site-packages"
    assert list_package_versions([str(site)]) == {"small-base": "2.0", "small-core": "1.2"}
    python = done.stdout.split()[0]
    assert python == str(tmp_path / "engines/small/bin/python") and os.access(python, os.X_OK)
    told = subprocess.run([python, "-c", "import small.core, sys; print(sys.version)"], capture_output=True, text=True)
    assert told.stdout.startswith(version), told.stderr
    listed = json.loads(cli.run("engines", "--json", cwd=tmp_path, **env).stdout)
    assert [each["remedy"] for each in listed if each["engine"] == "small"] == [""]
    again = cli.run("setup", "--engine", "small", cwd=tmp_path, **env)
    assert again.returncode == 0 and again.stderr == ""
