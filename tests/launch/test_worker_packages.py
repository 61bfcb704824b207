"""The package of a tracker is looked for in the environment of the workers before anything starts."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

import pytest

from fakes import cli
from primus.config.schema import LoggingConfig
from primus.engines.choice import EngineChoice
from primus.engines.installation import EngineInstallation
from primus.engines.requirement import read_engine
from primus.errors import UnfitError
from primus.experiment import list_tracker_packages
from primus.launch.worker_packages import check_worker_packages

ABSENT = "tracker_of_nobody"


def choose(prefix: Path, place: Literal["environment", "package"]) -> EngineChoice:
    """torchtitan in an environment at `prefix`."""
    python = str(prefix / "bin/python")
    folder = prefix / "lib/python3.11/site-packages"
    folder.mkdir(parents=True)
    found = EngineInstallation(engine="torchtitan", place=place, python=python, version="1", folder=str(folder))
    return EngineChoice(
        name="torchtitan", requirement=read_engine("torchtitan"), python=python, installation=found, note=""
    )


def test_the_trackers_of_an_experiment_are_those_that_it_turns_on() -> None:
    assert list_tracker_packages(LoggingConfig()) == ()
    assert list_tracker_packages(LoggingConfig(disable_wandb=False)) == ("wandb",)
    assert list_tracker_packages(LoggingConfig(disable_mlflow=False, disable_wandb=False)) == ("wandb", "mlflow")


def test_the_environment_of_the_engine_counts_and_not_that_of_primus(tmp_path: Path) -> None:
    engine = choose(tmp_path, "environment")
    with pytest.raises(UnfitError) as caught:
        check_worker_packages(["msgspec"], engine, {})  # primus has it
    assert str(tmp_path / "bin/python") in caught.value.problem
    assert "./primus-cli setup --engine torchtitan --with msgspec" in caught.value.hint
    package = tmp_path / "lib/python3.11/site-packages/msgspec"
    package.mkdir()
    (package / "__init__.py").touch()
    check_worker_packages(["msgspec"], engine, {})


def test_the_advice_names_the_command_for_each_kind_of_environment(tmp_path: Path) -> None:
    with pytest.raises(UnfitError) as caught:
        check_worker_packages([ABSENT], None, {})
    assert sys.executable in caught.value.problem
    assert caught.value.hint.startswith(f"./primus-cli setup --with {ABSENT}, or set disable_")
    with pytest.raises(UnfitError, match=f"{tmp_path}/bin/python") as caught:
        check_worker_packages([ABSENT], choose(tmp_path, "package"), {})
    assert caught.value.hint.startswith(f"{tmp_path}/bin/python -m pip install {ABSENT}")


def test_a_package_on_the_python_path_of_the_workers_counts(tmp_path: Path) -> None:
    (tmp_path / f"{ABSENT}.py").touch()
    check_worker_packages([ABSENT], None, {"PYTHONPATH": f"/none:{tmp_path}"})


def test_a_run_whose_tracker_is_absent_does_not_start_and_its_check_says_so(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text(
        "workspace: out\nmodules: {pre_trainer: {framework: abacus, model: tiny, "
        "overrides: {mock_data: true, seq_length: 8, train_iters: 2, disable_mlflow: false}}}\n"
    )
    if find_spec("mlflow"):
        pytest.skip("mlflow is installed here")
    for before in ((), ("--dry-run",)):
        done = cli.run(*before, "direct", "--", "train", "pretrain", "--config", "a.yaml", cwd=tmp_path)
        assert done.returncode == 3
        assert "the package mlflow is not installed in the environment of the workers" in done.stderr
    assert not (tmp_path / "out").exists()
    checked = cli.run("direct", "--", "config", "check", "--config", "a.yaml", cwd=tmp_path)
    assert checked.returncode == 0 and "note: disable_mlflow is false, but" in checked.stdout
