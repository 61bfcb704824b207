"""An engine is found in its environment, in a checkout or beside primus, without starting an interpreter."""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path

import pytest

from engine_python import find_engine, why_not_installed
from primus import registry
from primus.engines.choice import choose_engine
from primus.engines.installation import (
    find_environment_folder,
    find_environment_python,
    find_installation,
    list_installations,
)
from primus.engines.requirement import EngineRequirement, list_engines, read_engine
from primus.errors import UnfitError, UsageError
from primus.patch import includes_version
from primus.site_folders import find_version, list_import_folders, list_package_versions

SITE = f"lib/python{sys.version_info[0]}.{sys.version_info[1]}/site-packages"
ENGINE = EngineRequirement(
    title="Small", module="small.core", package="small-core", versions=">=1,<2", checkout_variables=("SMALL_PATH",)
)


def add_package(site: Path, name: str, version: str, module: str) -> None:
    folder = site / module.replace(".", "/")
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text("")
    info = site / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")


def add_environment(folder: Path, name: str) -> Path:
    """An environment with an interpreter; gives its site-packages."""
    (folder / name / "bin").mkdir(parents=True)
    (folder / name / "bin/python").symlink_to(sys.executable)
    (folder / name / SITE).mkdir(parents=True)
    return folder / name / SITE


def test_an_environment_takes_precedence_over_the_packages_beside_primus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    add_package(tmp_path / "main", "small-core", "1.0", "small.core")
    monkeypatch.syspath_prepend(tmp_path / "main")
    environ = {"PRIMUS_ENGINES": str(tmp_path / "shared")}
    beside = find_installation("small", ENGINE, environ)
    assert beside and (beside.place, beside.version, beside.python) == ("main environment", "1.0", sys.executable)
    add_package(add_environment(tmp_path / "shared", "small"), "small-core", "1.4", "small.core")
    found = find_installation("small", ENGINE, environ)
    assert found and (found.place, found.version) == ("environment", "1.4")
    assert found.python == str(find_environment_python("small", environ))


def test_an_installed_primus_keeps_its_engines_in_the_data_folder_of_the_user(monkeypatch: pytest.MonkeyPatch) -> None:
    assert find_environment_folder({"HOME": "/home/ann"}) == Path(sys.prefix) / "engines"
    monkeypatch.setattr("primus.package_files.CHECKOUT", None)
    own = find_environment_folder({"HOME": "/home/ann"})
    assert own.parent == Path("/home/ann/.local/share/primus/engines")
    assert find_environment_folder({"XDG_DATA_HOME": "/data"}) == Path("/data/primus/engines") / own.name
    assert find_environment_folder({"PRIMUS_ENGINES": "/shared"}) == Path("/shared")
    monkeypatch.setattr(sys, "prefix", "/another/environment")
    assert find_environment_folder({"HOME": "/home/ann"}).name.startswith("environment-")


def test_shared_packages_come_after_those_of_the_environment(tmp_path: Path) -> None:
    site = add_environment(tmp_path, "small")
    add_package(tmp_path / "main", "base", "1.0", "base")
    add_package(tmp_path / "main", "small-core", "1.0", "small.core")
    add_package(site, "small-core", "1.4", "small.core")
    (site / "shared.pth").write_text(f"import site; site.addsitedir({str(tmp_path / 'main')!r})\n")
    folders = list_import_folders(tmp_path / "small")
    assert folders == [str(site), str(tmp_path / "main")]
    assert list_package_versions(folders) == {"base": "1.0", "small-core": "1.4"}


def test_a_checkout_that_a_variable_names_runs_in_the_environment_with_the_version_of_its_files(tmp_path: Path) -> None:
    package = tmp_path / "checkout/small/core"
    package.mkdir(parents=True)
    (package / "package_info.py").write_text('MAJOR = 1\nMINOR = 7\nPATCH = 2\nPRE_RELEASE = "rc0"\n')
    environ = {"PRIMUS_ENGINES": str(tmp_path / "shared"), "SMALL_PATH": str(tmp_path / "checkout")}
    found = find_installation("small", ENGINE, environ)
    assert found and (found.place, found.version, found.python) == ("checkout", "1.7.2", sys.executable)
    add_package(add_environment(tmp_path / "shared", "small"), "small-core", "1.4", "small.core")
    again, *others = list_installations("small", ENGINE, environ)
    assert again.python == str(find_environment_python("small", environ)) and again.version == "1.7.2"
    assert [each.place for each in others] == ["environment"]


def test_a_variable_that_names_no_checkout_of_the_engine_is_ignored(tmp_path: Path) -> None:
    environ = {"PRIMUS_ENGINES": str(tmp_path), "SMALL_PATH": str(tmp_path)}
    assert find_installation("small", ENGINE, environ) is None


def test_an_empty_folder_of_an_uninstalled_package_is_not_a_package(tmp_path: Path) -> None:
    (tmp_path / "small/core/__pycache__").mkdir(parents=True)
    assert find_version("small-core", "small.core", [str(tmp_path)]) is None


def test_a_folder_of_pythonpath_counts_as_in_images_that_bring_an_engine(tmp_path: Path) -> None:
    add_package(tmp_path / "workspace", "small-core", "1.1", "small.core")
    environ = {"PRIMUS_ENGINES": str(tmp_path / "none"), "PYTHONPATH": f"{tmp_path}/other:{tmp_path}/workspace"}
    found = find_installation("small", ENGINE, environ)
    assert found and (found.version, found.place) == ("1.1", "main environment")


@pytest.mark.parametrize("name", registry.list_plug_ins("engines"))
def test_every_engine_pins_a_version_in_its_range_exactly(name: str) -> None:
    engine = read_engine(name)
    assert engine.python or engine.remedy, "there is a way to get it"
    for packages in engine.python.values():
        pinned = dict(each.split("==") for each in (*packages.packages, *packages.pins, *packages.if_missing.values()))
        assert includes_version(engine.versions, pinned[engine.package])
        assert len(pinned) == len(packages.packages) + len(packages.pins) + len(packages.if_missing)


def test_the_packages_depend_on_the_version_of_python() -> None:
    megatron = list_engines()["megatron"]
    old, new = megatron.find_packages("3.11"), megatron.find_packages("3.12.1")
    assert old and "megatron-core==0.16.1" in old.packages
    assert new and "megatron-core==0.19.2" in new.packages
    assert read_engine("torchtitan").find_packages("3.10.13") is None


def test_a_mistake_in_the_file_of_an_engine_is_named_with_its_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "engines").mkdir()
    (tmp_path / "engines/mine.yaml").write_text("title: Mine\nmodul: mine\npackage: mine\nversions: '>=1'\n")
    monkeypatch.setenv("PRIMUS_PLUGINS", str(tmp_path))
    with pytest.raises(UsageError) as error:
        read_engine("mine")
    assert "mine.yaml:2" in error.value.problem and "module" in error.value.problem


def test_the_helper_of_other_tests_names_what_to_type_or_gives_a_working_interpreter() -> None:
    for name in ("torchtitan", "jax"):
        found = find_engine(name)
        if found is None:
            assert why_not_installed(name).endswith(f"./primus-cli setup --engine {name}")
        else:
            assert os.access(found.python, os.X_OK) and why_not_installed(name) == ""


def test_a_variable_for_any_engine_must_name_a_checkout_of_one(tmp_path: Path) -> None:
    add_package(tmp_path, "megatron-core", "0.16.1", "megatron.core")
    for variable, folder in (("BACKEND_PATH", tmp_path), ("PRIMUS_PATH", tmp_path / "megatron")):
        with contextlib.suppress(UnfitError):  # torchtitan itself may be missing
            choose_engine(["torchtitan"], {variable: str(folder), "PRIMUS_INSTALL_ENGINES": "never"})
    for wrong in (tmp_path / "missing", tmp_path / "megatron"):
        with pytest.raises(UsageError, match=f"BACKEND_PATH={wrong}: no checkout of an engine"):
            choose_engine(["torchtitan"], {"BACKEND_PATH": str(wrong)})
