"""A run unpacks the kernels that were kept for it, and says why if it does not."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from primus.runs.files import write_json  # noqa: E402
from primus.session.tuned_kernels import use_tuned_kernels  # noqa: E402
from primus.tuning.kernel_cache import KernelCache, pack_cache  # noqa: E402


class LineCollector:
    """The part of a session that prints."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def print_line(self, text: str) -> None:
        self.lines.append(text)


@pytest.fixture
def cache_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "disk"))
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    (tmp_path / "disk").mkdir()
    (tmp_path / "compiled").mkdir()
    (tmp_path / "compiled" / "kernel.so").write_bytes(b"kernel")
    digest, count = pack_cache(tmp_path / "compiled", tmp_path / "cache.tar")
    write_cache(tmp_path / "cache.json", sha256=digest, num_files=count)
    return tmp_path / "cache.json"


def write_cache(path: Path, **fields: Any) -> None:
    valid_for = {"device": "A", "torch": str(torch.__version__)}
    values = {"valid_for": valid_for, "archive": "cache.tar", "cold_s": 9.0, "warm_s": 2.0, **fields}
    write_json(path, KernelCache(**values))


def read_line(file: Path, **environ: str) -> str:
    session = LineCollector()
    use_tuned_kernels(session, {"PRIMUS_TUNED_INDUCTOR": str(file), **environ})  # type: ignore[arg-type]
    (line,) = session.lines
    return line


def test_kernels_are_unpacked_to_the_local_disk_and_inductor_finds_them(cache_file: Path, tmp_path: Path) -> None:
    assert "1 files of tune inductor; the first step took 2.0 instead of 9.0 s" in read_line(cache_file)
    folder = Path(os.environ["TORCHINDUCTOR_CACHE_DIR"])
    assert (folder / "kernel.so").read_bytes() == b"kernel" and folder.is_relative_to(tmp_path / "disk")


@pytest.mark.parametrize(
    ("fields", "environ", "reason"),
    [
        ({"valid_for": {"torch": "1.0"}}, {}, "tuned for torch 1.0, this is"),
        ({"sha256": "0"}, {}, "its checksum differs"),
        ({"archive": "other.tar"}, {}, "cannot be unpacked"),
        ({"format": 7}, {}, "format 7"),
        ({}, {"TORCHINDUCTOR_CACHE_DIR": "own"}, "TORCHINDUCTOR_CACHE_DIR is set"),
    ],
)
def test_kernels_that_do_not_fit_are_named_and_the_run_compiles(
    fields: dict[str, Any], environ: dict[str, str], reason: str, cache_file: Path
) -> None:
    write_cache(cache_file, **{"sha256": "1", "num_files": 1, **fields})
    line = read_line(cache_file, **environ)
    assert line.startswith("compiled kernels: not used: ") and reason in line
    assert "TORCHINDUCTOR_CACHE_DIR" not in os.environ
