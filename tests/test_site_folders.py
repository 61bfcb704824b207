"""The packages on an import path, read from the files that the installers leave."""

from __future__ import annotations

from pathlib import Path

from primus.site_folders import list_package_versions

WHEEL = "Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n\nName: of its long description\nVersion: 9\n"


def write_wheel(site: Path, name: str, version: str) -> None:
    folder = site / f"{name.replace('.', '_')}-{version}.dist-info"
    folder.mkdir(parents=True)
    (folder / "METADATA").write_text(WHEEL.format(name=name, version=version))


def test_packages_of_each_kind_of_installer_are_listed_and_the_first_folder_wins(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    write_wheel(first, "Some.Package", "1.2")
    write_wheel(second, "Some.Package", "1.1")
    (second / "built-3.egg-info").mkdir()
    (second / "built-3.egg-info/PKG-INFO").write_text("Name: built\nVersion: 3\n")
    (second / "old-4.egg-info").write_text("Metadata-Version: 1.0\nName: old\nVersion: 4\nSummary: of distutils\n")
    (second / "broken-5.dist-info").mkdir()
    (second / "nameless-6.dist-info").mkdir()
    (second / "nameless-6.dist-info/METADATA").write_text("Version: 6\n\nName: nameless\n")
    expected = {"built": "3", "old": "4", "some.package": "1.2"}
    assert list_package_versions([str(first), str(second)]) == expected
