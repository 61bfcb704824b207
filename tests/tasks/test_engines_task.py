"""`engines` lists what is installed, where and in which version, and what to type for the rest."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from fakes import cli
from fakes.engine_wheels import write_engine_plug_ins

SITE = f"lib/python{sys.version_info[0]}.{sys.version_info[1]}/site-packages"


def put_engine(folder: Path, version: str) -> None:
    (folder / "small/core").mkdir(parents=True)
    (folder / "small/core/__init__.py").write_text(f"__version__ = {version!r}\nraise RuntimeError('imported')\n")


def put_environment(engines: Path, version: str) -> None:
    (engines / "small/bin").mkdir(parents=True)
    (engines / "small/bin/python").symlink_to(sys.executable)
    put_engine(engines / "small" / SITE, version)


@pytest.fixture
def variables(tmp_path: Path) -> dict[str, str]:
    write_engine_plug_ins(tmp_path / "plug-ins")
    return {"PRIMUS_PLUGINS": str(tmp_path / "plug-ins"), "PRIMUS_ENGINES": str(tmp_path / "engines")}


def list_small(tmp_path: Path, env: dict[str, str]) -> list[dict[str, object]]:
    done = cli.run("engines", "--json", cwd=tmp_path, **env)
    assert done.returncode == 0, done.stderr
    return [each for each in json.loads(done.stdout) if each["engine"] == "small"]


def test_every_engine_is_listed_with_what_to_type_for_those_that_are_missing(
    tmp_path: Path, variables: dict[str, str]
) -> None:
    done = cli.run("engines", "--json", cwd=tmp_path, **variables)
    by_name = {each["engine"]: each for each in json.loads(done.stdout)}
    wanted = {"native", "torchtitan", "megatron", "jax", "maxtext", "megatron-bridge", "huggingface", "small"}
    assert wanted == set(by_name)
    small = by_name["small"]
    assert (small["installed"], small["supported"]) == (False, ">=1,<2")
    assert small["remedy"] == "./primus-cli setup --engine small"
    text = cli.run("direct", "--", "engines", cwd=tmp_path, **variables)
    assert "./primus-cli setup --engine small" in text.stdout


def test_an_engine_is_listed_for_each_installation_and_the_first_one_is_used(
    tmp_path: Path, variables: dict[str, str]
) -> None:
    put_environment(tmp_path / "engines", "1.4")
    put_engine(tmp_path / "checkout", "1.7")
    put_engine(tmp_path / "image", "1.1")
    path = f"{cli.SOURCE}:{tmp_path / 'image'}"
    found = list_small(tmp_path, variables | {"SMALL_PATH": str(tmp_path / "checkout"), "PYTHONPATH": path})
    assert [(each["version"], each["used"]) for each in found] == [("1.7", True), ("1.4", False), ("1.1", False)]
    assert found[0]["place"] == f"checkout {tmp_path / 'checkout'}"
    assert found[0]["python"] == str(tmp_path / "engines/small/bin/python"), "the checkout runs in the environment"
    assert found[1]["remedy"] == "not used: checkout comes first"


def test_a_version_out_of_the_range_is_reported_with_what_to_type(tmp_path: Path, variables: dict[str, str]) -> None:
    put_environment(tmp_path / "engines", "2.0")
    (small,) = list_small(tmp_path, variables)
    assert small["remedy"] == ("not supported: ./primus-cli setup --engine small, or try it with --allow-version")


def test_a_variable_that_names_no_checkout_is_reported(tmp_path: Path, variables: dict[str, str]) -> None:
    (small,) = list_small(tmp_path, variables | {"SMALL_PATH": str(tmp_path)})
    assert "SMALL_PATH names no checkout of Small" in str(small["remedy"])


def test_an_environment_that_does_not_share_a_needed_module_is_reported(
    tmp_path: Path, variables: dict[str, str]
) -> None:
    file = tmp_path / "plug-ins/engines/small.yaml"
    file.write_text(file.read_text().replace("needs: []", "needs: [tensors]"))
    put_environment(tmp_path / "engines", "1.4")
    (small,) = list_small(tmp_path, variables)
    assert str(small["remedy"]).startswith("tensors cannot be imported by ")
