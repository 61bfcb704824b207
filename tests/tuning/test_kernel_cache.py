"""An archive of compiled kernels is complete or refused, and survives processes that unpack it at once."""

from __future__ import annotations

import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from primus.errors import PrimusError
from primus.tuning.kernel_cache import KernelCache, keep_cache, pack_cache, read_kernel_cache, unpack_cache


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An archive in a store."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "disk"))
    (tmp_path / "disk").mkdir()
    compiled = tmp_path / "compiled" / "ab"
    compiled.mkdir(parents=True)
    (compiled / "kernel.so").write_bytes(b"kernel")
    (compiled / "kernel.lock").write_bytes(b"")
    digest, count = pack_cache(tmp_path / "compiled", tmp_path / "cache.tar")
    assert count == 1
    cache = KernelCache(archive="cache.tar", sha256=digest, num_files=count, cold_s=2.0, warm_s=1.0)
    keep_cache(cache, tmp_path, tmp_path / "store" / "inductor-1.json")
    return tmp_path / "store" / "inductor-1.json"


def test_processes_that_unpack_at_once_find_one_complete_folder(kept: Path) -> None:
    cache = read_kernel_cache(kept)
    with ThreadPoolExecutor(8) as pool:
        folders = set(pool.map(lambda _: unpack_cache(kept, cache), range(8)))
    (folder,) = folders
    assert (folder / "ab" / "kernel.so").read_bytes() == b"kernel"
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]


def test_a_damaged_or_missing_archive_is_refused(kept: Path) -> None:
    cache = read_kernel_cache(kept)
    archive = kept.with_name(cache.archive)
    archive.write_bytes(archive.read_bytes()[:-600])
    with pytest.raises(PrimusError, match="its checksum differs"):
        unpack_cache(kept, cache)
    archive.unlink()
    with pytest.raises(PrimusError, match="cannot be unpacked"):
        unpack_cache(kept, cache)


def test_a_newer_archive_replaces_the_older_one(kept: Path, tmp_path: Path) -> None:
    (tmp_path / "compiled" / "more.so").write_bytes(b"more")
    digest, count = pack_cache(tmp_path / "compiled", tmp_path / "cache.tar")
    keep_cache(KernelCache(archive="cache.tar", sha256=digest, num_files=count, cold_s=2.0, warm_s=1.0), tmp_path, kept)
    assert len(list(kept.parent.iterdir())) == 2
    assert (unpack_cache(kept, read_kernel_cache(kept)) / "more.so").exists()


def test_a_run_that_compiled_nothing_leaves_no_archive(tmp_path: Path) -> None:
    with pytest.raises(PrimusError, match="no kernels"):
        pack_cache(tmp_path / "empty", tmp_path / "cache.tar")


@pytest.mark.parametrize(("warm_s", "is_faster"), [(1.9, True), (2.0, False), (3.0, False), (None, False)])
def test_an_archive_is_faster_only_if_a_start_with_it_is(warm_s: float | None, is_faster: bool) -> None:
    cache = KernelCache(archive="a.tar", sha256="0", num_files=1, cold_s=2.0, warm_s=warm_s)
    assert cache.is_faster == is_faster
