"""`tune threads` tries the allocators that a machine has, and preloads them beside what the user preloads."""

from __future__ import annotations

import platform
from pathlib import Path

import pytest

from primus.errors import UnfitError
from primus.tuning import allocators
from primus.tuning.allocators import list_allocators

is_glibc = platform.libc_ver()[0] == "glibc"


def test_installed_libraries_are_preloaded_and_missing_ones_skipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(allocators, "SYSTEM_FOLDERS", ())
    for name in (
        "libtcmalloc_debug.so.4",
        "libtcmalloc_and_profiler.so.4",
        "libtcmalloc_minimal.so.4",
        "libtcmalloc.a",
    ):
        (tmp_path / name).touch()
    environ = {"LD_LIBRARY_PATH": f":relative:{tmp_path}", "LD_PRELOAD": "/opt/trace.so"}
    found = list_allocators((), environ)
    assert list(found) == ["default", *(["glibc"] if is_glibc else []), "tcmalloc"]
    assert found["default"] == {}
    if is_glibc:  # freed tensors of a step are kept, whatever their size
        assert int(found["glibc"]["MALLOC_TRIM_THRESHOLD_"]) >= 16 * 2**30
        assert found["glibc"]["MALLOC_MMAP_MAX_"] == "0"
    assert found["tcmalloc"] == {"LD_PRELOAD": f"{tmp_path}/libtcmalloc_minimal.so.4:/opt/trace.so"}
    (tmp_path / "libjemalloc.so.2").touch()
    assert "dirty_decay_ms:-1" in list_allocators(("jemalloc",), environ)["jemalloc"]["MALLOC_CONF"]


def test_an_allocator_that_is_asked_for_and_missing_is_one_message(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(allocators, "SYSTEM_FOLDERS", ())
    with pytest.raises(UnfitError, match="jemalloc is not installed") as caught:
        list_allocators(("jemalloc",), {})
    assert "libjemalloc2" in str(caught.value.hint)
