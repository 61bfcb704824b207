"""A wheel that is built from the source distribution works in an environment of its own, away from a checkout."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from fakes.archives import extract_all

ROOT = Path(__file__).parents[1]
SOURCES = ("src", "examples", "CHANGELOG.md", "constraints.txt", "pyproject.toml", "README.md", "LICENSE")
PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check")
LARGEST_WHEEL_BYTES = 4 << 20
"""2.6 MB when this was written: a folder of data or logs that gets into the package would exceed it."""

pytestmark = [pytest.mark.slow, pytest.mark.native]


def output(*command: object, cwd: Path | None = None) -> str:
    done = subprocess.run([str(word) for word in command], cwd=cwd, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr + done.stdout
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built as an index gets it: the source distribution first, then the wheel from that alone."""
    folder = tmp_path_factory.mktemp("build")
    ignored = shutil.ignore_patterns("*.egg-info", "__pycache__")
    (folder / "source").mkdir()
    for name in SOURCES:
        target = folder / "source" / name
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, target, symlinks=True, ignore=ignored)
        else:
            shutil.copy(ROOT / name, target)
    build = "import sys; from setuptools import build_meta; build_meta.build_sdist(sys.argv[1])"
    output(sys.executable, "-c", build, folder, cwd=folder / "source")
    (archive,) = folder.glob("primus-*.tar.gz")
    with tarfile.open(archive) as members:
        extract_all(members, folder)
    (unpacked,) = folder.glob("primus-*/")
    words = ("--no-index", "--no-deps", "--no-build-isolation", "--wheel-dir", folder)
    output(*PIP, "wheel", *words, unpacked)
    (made,) = folder.glob("primus-*.whl")
    return made


def install(wheel: Path, prefix: Path) -> Path:
    """Make an environment with the wheel and what it requires for training; gives its primus-cli."""
    output(sys.executable, "-m", "venv", "--without-pip", prefix)
    output(*PIP, "--python", prefix / "bin/python", "install", "--no-index", "--no-deps", "--no-compile", wheel)
    (site,) = prefix.glob("lib/python3*/site-packages")
    for each in iterate_requirements("primus[native]", {"primus"}):
        for top in {file.parts[0] for file in each.files or () if file.parts[0] not in ("..", "__pycache__")}:
            if not (site / top).exists():
                (site / top).symlink_to(os.path.abspath(each.locate_file(top)))
    return prefix / "bin/primus-cli"


def iterate_requirements(name: str, seen: set[str]) -> Iterator[Distribution]:
    """What a package requires, without the packages that this environment lacks as well, such as libraries of CUDA."""
    asked = Requirement(name)
    for text in distribution(asked.name).requires or ():
        wanted = Requirement(text)
        extras = asked.extras or {""}
        if wanted.name.lower() in seen or not any(
            wanted.marker is None or wanted.marker.evaluate({"extra": extra}) for extra in extras
        ):
            continue
        seen.add(wanted.name.lower())
        try:
            found = distribution(wanted.name)
        except PackageNotFoundError:
            continue
        yield found
        yield from iterate_requirements(wanted.name, seen)


class Installation:
    """An installed primus, with a home folder and a working folder of its own."""

    def __init__(self, command: Path, folder: Path) -> None:
        self.command, self.folder = command, folder
        for name in ("home", "work"):
            (folder / name).mkdir(parents=True, exist_ok=True)

    def run(self, line: str, **variables: str) -> subprocess.CompletedProcess[str]:
        environ = {"PATH": "/usr/bin:/bin", "HOME": str(self.folder / "home"), "OMP_NUM_THREADS": "1", **variables}
        command = [str(self.command), *line.split()]
        return subprocess.run(
            command, cwd=self.folder / "work", env=environ, capture_output=True, text=True, timeout=200
        )

    def read(self, line: str, **variables: str) -> str:
        done = self.run(line, **variables)
        assert done.returncode == 0, done.stderr
        return done.stdout


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Installation:
    folder = tmp_path_factory.mktemp("installed")
    return Installation(install(wheel, folder / "venv"), folder)


@pytest.fixture(scope="module")
def trained(installed: Installation) -> str:
    """Id of a run of the quick start, with a smaller model and random tokens."""
    small = "--mock_data true --tokenizer_type null --model tiny --seq_length 32 --train_iters 2 --eval_iters 0"
    done = installed.run(f"direct -- train pretrain --config examples:quickstart {small}")
    assert done.returncode == 0, done.stderr
    return os.readlink(installed.folder / "work/output/quickstart/latest")


def test_the_wheel_is_small_and_holds_no_file_of_the_developers(wheel: Path) -> None:
    assert wheel.stat().st_size < LARGEST_WHEEL_BYTES
    listed = output(sys.executable, "-m", "zipfile", "-l", wheel)
    assert "primus/examples/quickstart.yaml" in listed and "primus/CHANGELOG.md" in listed
    assert "tests/" not in listed and "__pycache__" not in listed


def test_a_python_that_is_too_old_is_refused_by_the_metadata(wheel: Path) -> None:
    uv = os.path.join(sys.prefix, "bin/uv")  # pip reads the metadata for the Python that runs it only
    words = "pip compile --offline --no-index --no-deps --no-cache --python-version 3.9 -"
    asked = f"primus @ {wheel.as_uri()}"
    done = subprocess.run([uv, *words.split()], input=asked, capture_output=True, text=True, timeout=100)
    assert done.returncode == 1 and "primus==0.1.0 depends on Python>=3.10" in done.stderr, done.stderr


def test_an_installed_primus_trains_an_example_by_its_name(installed: Installation, trained: str) -> None:
    (run,) = json.loads(installed.read("--json direct -- runs list"))
    assert (run["id"], run["name"], run["state"], run["steps"]) == (trained, "quickstart", "done", 2)
    assert "examples:quickstart.yaml" in installed.read("direct -- config show --config examples:quickstart")


def test_examples_that_name_data_work_by_name_and_as_copies(installed: Installation) -> None:
    installed.read("direct -- config check --config examples:posttrain/quickstart")
    installed.read("direct -- config examples copy posttrain/quickstart")
    installed.read("direct -- config check --config examples/posttrain/quickstart.yaml")
    again = installed.run("direct -- config examples copy posttrain/quickstart")
    assert again.returncode == 2 and "--force replaces it" in again.stderr
    assert "did you mean 'quickstart'" in installed.run("direct -- config check --config examples:quikstart").stderr


def test_messages_and_remote_commands_name_the_installed_command(installed: Installation) -> None:
    assert f"exec {installed.command} --no-config" in installed.read(
        "--dry-run slurm sbatch -N 2 -- train pretrain --config examples:quickstart"
    )
    assert "What to change when you upgrade" in installed.read("upgrade-notes 0.0.1")
    listed = installed.read("engines")
    assert "primus-cli setup --engine jax" in listed and "./primus-cli" not in listed
    assert "installs PyTorch for this machine" in installed.read("--dry-run setup")


def test_environments_of_engines_are_in_the_data_folder_of_the_user(installed: Installation) -> None:
    data = str(installed.folder / "data")
    planned = installed.read("--dry-run setup --engine jax", XDG_DATA_HOME=data)
    assert f"{data}/primus/engines/venv-" in planned
    refused = installed.run("setup --engine jax", HOME="/proc/none")
    assert refused.returncode == 3 and "PRIMUS_ENGINES=~/primus-engines" in refused.stderr, refused.stderr
    installed.read("--dry-run direct -- train pretrain --config examples:quickstart", HOME="/proc/none")


def test_two_versions_side_by_side_read_each_others_runs_and_share_no_engine(
    wheel: Path, installed: Installation, trained: str, tmp_path: Path
) -> None:
    newer = Installation(install(wheel, tmp_path / "newer"), installed.folder)
    (init,) = tmp_path.glob("newer/lib/python3*/site-packages/primus/__init__.py")
    init.write_text(init.read_text().replace('"0.1.0"', '"0.2.0"'))
    assert (installed.read("--version"), newer.read("--version")) == ("primus 0.1.0\n", "primus 0.2.0\n")
    shown = json.loads(newer.read(f"--json direct -- runs show {trained}"))
    assert (shown["metadata"]["version"], shown["metadata"]["outcome"]["state"]) == ("0.1.0", "done")
    folders = {each.read("--dry-run setup --engine jax").split("environment ")[1] for each in (installed, newer)}
    assert len(folders) == 2
