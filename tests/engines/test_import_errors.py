"""Errors of an engine's imports are one message, which says when they were raised."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

from primus.engines.import_errors import explain_import_errors
from primus.errors import UnfitError


@pytest.mark.parametrize(
    ("code", "problem"),
    [
        ("import not_there", "cannot be imported: ModuleNotFoundError: No module named 'not_there'"),
        ("raise OSError('libx.so.3')", "cannot be imported: OSError: libx.so.3"),
        ("def step():\n    from os import fused", "needs what is not installed: ImportError: cannot import name"),
    ],
)
def test_an_import_in_a_step_is_told_from_one_at_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str, problem: str
) -> None:
    (tmp_path / "engine_of_test.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "engine_of_test", raising=False)
    with pytest.raises(UnfitError, match=problem), explain_import_errors(["megatron"]):
        importlib.import_module("engine_of_test").step()
