"""Folders of a run are written and read past the cache; slow, full and failing ones are named."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from fakes import tools
from primus.machine.facts import MachineFacts
from primus.machine.tree import FileTree
from primus.preflight.findings.finding import CheckFinding
from primus.preflight.findings.node import NodeExpectations, PreflightNode
from primus.preflight.findings.thresholds import Thresholds
from primus.preflight.performance import storage_speed

FIO = """\
echo "$@" >> {log}
echo 'note: both iodepth >= 1 and synchronous I/O engine are selected'
echo '{{"fio version": "fio-3.36", "jobs": [{{"jobname": "primus", "error": {error},
  "read": {{"bw_bytes": {read}}}, "write": {{"bw_bytes": {write}}}}}]}}'
"""


def node(folder: Path, environ: dict[str, str] | None = None) -> PreflightNode:
    expected = NodeExpectations(folders=((str(folder), "workspace"),))
    environ = {"PATH": "/nowhere"} if environ is None else environ
    return PreflightNode(
        facts=MachineFacts(),
        tree=FileTree(),
        environ=environ,
        expected=expected,
        limits=Thresholds(storage_mb_per_s=100),
    )


def only(found: object) -> CheckFinding:
    (one,) = found  # type: ignore[misc]
    assert isinstance(one, CheckFinding)
    return one


def test_a_folder_is_written_and_read_and_nothing_is_left(tmp_path: Path) -> None:
    speed = storage_speed.measure_with_direct_io(tmp_path, 3 * storage_speed.BLOCK_BYTES, 10)
    assert speed.write_mb_per_s > 0 and speed.read_mb_per_s > 0
    assert not list(tmp_path.iterdir())
    assert only(storage_speed.measure_folders(node(tmp_path), is_quick=True)).subject == f"workspace {tmp_path}"
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("read", "write", "status"), [(2e9, 1e9, "ok"), (2e9, 5e7, "warn"), (5e7, 1e9, "warn")])
def test_fio_measures_where_it_is_installed_and_a_slow_direction_is_named(
    tmp_path: Path, read: float, write: float, status: str
) -> None:
    body = FIO.format(log=tmp_path / "log", error=0, read=read, write=write)
    one = only(storage_speed.measure_folders(node(tmp_path, tools.tool(tmp_path / "bin", "fio", body)), is_quick=True))
    assert (one.status, "fio" in one.measured) == (status, True)
    assert one.measured.startswith(f"written {write / 1e6:,.0f} MB/s, read {read / 1e6:,.0f} MB/s")
    assert "--direct=1" in (tmp_path / "log").read_text()


def test_where_fio_fails_the_folder_is_measured_without_it(tmp_path: Path) -> None:
    body = FIO.format(log=tmp_path / "log", error=28, read=1e9, write=1e9)
    one = only(storage_speed.measure_folders(node(tmp_path, tools.tool(tmp_path / "bin", "fio", body)), is_quick=True))
    assert "fio" not in one.measured


@pytest.mark.parametrize("text", ["", "{", "fio: engine not found", json.dumps({"jobs": []})])
def test_output_without_figures_is_not_a_speed(text: str) -> None:
    assert storage_speed.parse_fio(text, "write") is None


def test_what_is_read_differently_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"\1" * storage_speed.BLOCK_BYTES)
    file = os.open(path, os.O_RDONLY)
    try:
        with pytest.raises(OSError, match="differs from what was written"):
            storage_speed._read_blocks(file, storage_speed.BLOCK_BYTES)
    finally:
        os.close(file)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full")
def test_a_full_file_system_is_an_error() -> None:
    file = os.open("/dev/full", os.O_WRONLY)
    try:
        with pytest.raises(OSError, match="No space left"):
            storage_speed._write_blocks(file, storage_speed.BLOCK_BYTES, 1)
    finally:
        os.close(file)
