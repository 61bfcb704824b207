"""A wheel of the package has every file that the code reads beside its modules."""

from __future__ import annotations

from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src/primus"


def test_every_file_that_is_no_module_is_package_data() -> None:
    tomllib = pytest.importorskip("tomllib")  # Python 3.11
    patterns = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]["primus"]
    packaged = {path for pattern in patterns for path in PACKAGE.glob(pattern)}
    files = {path for path in PACKAGE.rglob("*") if path.is_file() and path.suffix not in (".py", ".pyc")}
    assert files - packaged == set()
