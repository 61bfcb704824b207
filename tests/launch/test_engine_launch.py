"""Workers run in the interpreter of their engine, in a version that the backend supports."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from fakes import cli
from fakes.engine_wheels import EXPERIMENT, make_engine_wheels, offline_variables, write_engine_plug_ins

TRAIN = ("--", "train", "pretrain", "--config", "small.yaml")
MATRIX = """\
name: night
experiment: small.yaml
platforms: {cpu: {processes: 1}}
frameworks: [small]
models: {llama: {preset: llama3.2_1B}}
repetitions: 1
"""


class EngineUser:
    """A working folder with an experiment of the small engine, whose environments are made offline."""

    def __init__(self, folder: Path) -> None:
        self.cwd, self.wheels, self.engines = folder, folder / "wheels", folder / "engines"
        self.prefix = self.engines / "small"
        self.env = offline_variables(self.wheels, folder / "plug-ins", self.engines)
        make_engine_wheels(self.wheels, "1.2")
        write_engine_plug_ins(folder / "plug-ins")
        (folder / "small.yaml").write_text(EXPERIMENT)

    def run(self, *words: str, **env: str) -> subprocess.CompletedProcess[str]:
        return cli.run(*words, cwd=self.cwd, timeout_s=120, **self.env | env)

    def install_engine(self, version: str, code: str = "") -> None:
        """An environment of the user's own, with the engine in a version and the packages of primus."""
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(self.prefix)], check=True)
        site = next(self.prefix.glob("lib/python3*/site-packages"))
        shared = [entry for entry in sys.path if entry.endswith("-packages")]
        (site / "shared.pth").write_text("".join(f"import site; site.addsitedir({entry!r})\n" for entry in shared))
        (site / "small/core").mkdir(parents=True)
        (site / "small/core/__init__.py").write_text(f"__version__ = {version!r}\n{code}\n")
        info = site / f"small_core-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: small-core\nVersion: {version}\n")

    def engine_lines(self) -> list[list[str]]:
        """Version and interpreter, of each rank."""
        logs = sorted((self.cwd / "output/small/latest/logs/attempt_0").glob("rank_*.log"))
        return [line.split()[1:] for log in logs for line in log.read_text().splitlines() if line[:7] == "engine "]


@pytest.fixture
def user(tmp_path: Path) -> EngineUser:
    return EngineUser(tmp_path)


@pytest.mark.slow
@pytest.mark.native
def test_the_first_launch_makes_the_environment_and_all_ranks_run_in_it(user: EngineUser) -> None:
    planned = user.run("--dry-run", "direct", *TRAIN)
    assert planned.returncode == 0, planned.stderr
    assert f"note: Small is not installed: setup makes its environment {user.prefix} first" in planned.stdout
    assert f"\n  before environment {user.prefix}  # each node, at most 1800 s\n" in planned.stdout
    assert not user.engines.exists()
    done = user.run("direct", "--nproc", "2", *TRAIN)
    assert done.returncode == 0, done.stderr
    assert f"Small 1.2 in the environment {user.prefix}" in done.stdout
    assert user.engine_lines() == [["1.2", str(user.prefix / "bin/python")]] * 2
    recorded = json.loads((user.cwd / "output/small/latest/env/engine.json").read_text())
    assert (recorded["engine"], recorded["version"], recorded["place"]) == ("small", "1.2", "environment")
    assert "small-core==1.2" in (user.cwd / "output/small/latest/env/packages.txt").read_text().splitlines()


def test_a_launch_that_may_not_install_says_what_to_type(user: EngineUser) -> None:
    refused = user.run("direct", *TRAIN, PRIMUS_INSTALL_ENGINES="never")
    assert refused.returncode == 3
    assert "Small is not installed" in refused.stderr and "./primus-cli setup --engine small" in refused.stderr
    assert not user.engines.exists() and not (user.cwd / "output").exists()
    assert user.run("direct", *TRAIN, PRIMUS_INSTALL_ENGINES="no").returncode == 2


@pytest.mark.slow
@pytest.mark.native
def test_a_comparison_installs_the_engine_first_and_refuses_its_cells_if_it_cannot(user: EngineUser) -> None:
    (user.cwd / "matrix.yaml").write_text(MATRIX)
    compare = ("direct", "--", "compare", "run", "--matrix", "matrix.yaml")
    planned = user.run("--dry-run", *compare)
    assert f"note: Small is not installed: setup makes its environment {user.prefix} first" in planned.stdout
    wheels = user.wheels.rename(user.cwd / "aside")
    refused = user.run(*compare, "--json")
    assert refused.returncode == 1, refused.stderr
    cell = json.loads(refused.stdout)["cells"][0]
    assert cell["state"] == "refused" and cell["reason"].startswith("Small cannot be installed"), cell
    wheels.rename(user.wheels)
    done = user.run(*compare, "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["states"] == {"done": 1} and "creating environment of Small" in done.stderr

    shutil.rmtree(user.prefix)
    engines = ("--config", "small.yaml", "--engines", "small", "--steps", "2")
    compared = user.run("direct", "--", "compare", "engines", *engines)
    assert compared.returncode == 0, compared.stdout + compared.stderr
    assert "creating environment of Small" in compared.stdout + compared.stderr and user.prefix.is_dir()


@pytest.mark.slow
def test_a_launch_without_network_fails_with_the_reason_before_workers_start(user: EngineUser) -> None:
    for wheel in user.wheels.iterdir():
        wheel.unlink()
    failed = user.run("direct", *TRAIN)
    assert failed.returncode == 3 and "Small cannot be installed" in failed.stderr
    assert "docs/engines.md" in failed.stderr and "Traceback" not in failed.stderr


def test_an_engine_out_of_the_range_is_refused_with_the_range_or_tried(user: EngineUser) -> None:
    user.install_engine("2.4")
    refused = user.run("direct", *TRAIN)
    assert refused.returncode == 3
    assert f"Small 2.4 in the environment {user.prefix} is not supported: the framework needs >=1,<2" in refused.stderr
    assert "to try this one, add --allow-version" in refused.stderr
    tried = user.run("direct", "--single", *TRAIN, "--allow-version")
    assert tried.returncode == 0, tried.stderr
    assert "not one of the supported versions" in tried.stdout
    assert user.engine_lines() == [["2.4", str(user.prefix / "bin/python")]]


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("import missing_kernels", "ModuleNotFoundError: No module named 'missing_kernels'"),
        ("raise RuntimeError('undefined symbol: _ZN3c10')", "RuntimeError: undefined symbol: _ZN3c10"),
    ],
)
def test_an_engine_that_fails_on_import_is_reported_in_one_line_with_the_log(
    user: EngineUser, code: str, said: str
) -> None:
    user.install_engine("1.2", code)
    failed = user.run("direct", "--single", *TRAIN)
    assert failed.returncode == 3
    assert f"cannot be imported: {said}" in failed.stderr and "Traceback" not in failed.stderr
    assert "logs/attempt_0/rank_0.log" in failed.stderr
    assert "Traceback" in (user.cwd / "output/small/latest/logs/attempt_0/rank_0.log").read_text()


def test_a_checkout_that_a_variable_names_is_imported_by_the_workers(user: EngineUser) -> None:
    (user.cwd / "checkout/small/core").mkdir(parents=True)
    (user.cwd / "checkout/small/core/__init__.py").write_text("__version__ = '1.7'\n")
    done = user.run("direct", "--single", *TRAIN, SMALL_PATH=str(user.cwd / "checkout"))
    assert done.returncode == 0, done.stderr
    assert f"Small 1.7 in the checkout {user.cwd / 'checkout'}" in done.stdout
    assert user.engine_lines() == [["1.7", sys.executable]]


def test_a_checkout_that_cannot_be_used_is_refused_before_workers_start(user: EngineUser) -> None:
    checkout = user.cwd / "checkout"
    refused = user.run("direct", *TRAIN, SMALL_PATH=str(checkout))
    assert refused.returncode == 2
    assert f"SMALL_PATH={checkout}: no checkout of Small: it has no folder small/core" in refused.stderr
    (checkout / "small/core").mkdir(parents=True)
    (checkout / "small/core/__init__.py").write_text("__version__ = '1.7'\n")
    (checkout / "pyproject.toml").write_text('[project]\nrequires-python = ">=3.99"\n')
    refused = user.run("direct", *TRAIN, SMALL_PATH=str(checkout))
    assert refused.returncode == 3
    assert f"Small 1.7 in the checkout {checkout} needs Python >=3.99, and {sys.executable} is 3." in refused.stderr


def test_an_engine_beside_primus_as_in_an_image_runs_in_the_interpreter_of_primus(user: EngineUser) -> None:
    (user.cwd / "image/small/core").mkdir(parents=True)
    (user.cwd / "image/small/core/__init__.py").write_text("__version__ = '1.1'\n")
    done = user.run("direct", "--single", *TRAIN, PYTHONPATH=f"{cli.SOURCE}:{user.cwd / 'image'}")
    assert done.returncode == 0, done.stderr
    assert user.engine_lines() == [["1.1", sys.executable]]


def test_workers_run_the_primus_that_launched_them_not_that_of_the_environment(user: EngineUser) -> None:
    user.install_engine("1.2")
    site = next(user.prefix.glob("lib/python3*/site-packages"))
    (site / "primus").mkdir()
    (site / "primus/__init__.py").write_text("raise RuntimeError('the primus of the environment')\n")
    done = user.run("direct", "--single", *TRAIN, PYTHONPATH="")
    assert done.returncode == 0, done.stderr


def test_a_replay_compares_the_version_of_the_engine(user: EngineUser) -> None:
    user.install_engine("1.2")
    assert user.run("direct", "--single", *TRAIN).returncode == 0
    run_folder = (user.cwd / "output/small/latest").resolve()
    replay = ("direct", "--single", "--", "train", "pretrain", "--replay", str(run_folder))
    again = user.run(*replay)
    assert again.returncode == 0 and "package" not in again.stdout, again.stderr
    shutil.rmtree(user.prefix)
    user.install_engine("1.3")
    refused = user.run(*replay)
    assert refused.returncode == 3
    assert "package small-core: 1.2 then, 1.3 now" in refused.stderr


@pytest.mark.parametrize("framework", ["nemo", "NeMo", "neme", "nemo-toolkit", "automodel", "nemo_automodel"])
def test_a_framework_without_a_backend_is_refused_with_the_reason_and_an_alternative(
    user: EngineUser, framework: str
) -> None:
    (user.cwd / "small.yaml").write_text(EXPERIMENT.replace("framework: small", f"framework: {framework}"))
    refused = user.run("direct", "--", "config", "check", "--config", "small.yaml")
    assert refused.returncode == 2
    assert f"framework '{framework}': " in refused.stderr and "framework: " in refused.stderr.splitlines()[-1]
