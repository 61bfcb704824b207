"""Archives are files that tar, gzip, xz and zstd read; folders of a machine are named in whole components."""

from __future__ import annotations

import io
import shutil
import subprocess
import tarfile
from pathlib import Path

import pytest

from primus.errors import PrimusError
from primus.run_archive import compression, tar_members
from primus.run_archive.compression import ENDINGS, open_reader, open_writer
from primus.run_archive.local_paths import PathNames, restore_paths

CONTENT = b"one line of a log\n" * 50_000
BY_PROGRAM = pytest.param(
    ".tar.zst", True, marks=pytest.mark.skipif(shutil.which("zstd") is None, reason="the program zstd is not installed")
)


def read_all(file: Path, ending: str) -> None:
    with open_reader(file, ending) as stream:
        while stream.read(1 << 20):
            pass


@pytest.mark.parametrize(("ending", "by_program"), [(ending, False) for ending in ENDINGS] + [BY_PROGRAM])
def test_a_compressed_file_is_read_back_and_damage_is_one_message(
    ending: str, by_program: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if ending == ".tar.zst" and not by_program:
        pytest.importorskip("zstandard")
    monkeypatch.setattr(compression, "_has_package", lambda: not by_program)
    file = tmp_path / f"x{ending}"
    with open_writer(file, ending) as stream:
        stream.write(CONTENT)
    assert file.stat().st_size < len(CONTENT) / 10
    with open_reader(file, ending) as stream:
        assert stream.read() == CONTENT
    monkeypatch.undo()  # the package reads what the program wrote
    with open_reader(file, ending) as stream:
        assert stream.read() == CONTENT
    monkeypatch.setattr(compression, "_has_package", lambda: not by_program)
    file.write_bytes(file.read_bytes()[:-20])
    with pytest.raises(PrimusError, match=f"x{ending}: "):
        read_all(file, ending)


def test_the_program_zstd_reads_what_the_package_writes(tmp_path: Path) -> None:
    pytest.importorskip("zstandard")
    if shutil.which("zstd") is None:
        pytest.skip("the program zstd is not installed")
    with open_writer(tmp_path / "x.tar.zst", ".tar.zst") as stream:
        stream.write(CONTENT)
    done = subprocess.run(["zstd", "-dcq", tmp_path / "x.tar.zst"], capture_output=True, check=True, timeout=20)
    assert done.stdout == CONTENT


@pytest.mark.parametrize("size", [0, 1, 8**11 - 1, 8**11, 5 << 40])
def test_a_header_is_read_by_tarfile_and_by_the_reader_for_any_size(size: int) -> None:
    name = f"{'f' * 90}/{'g' * 60}/{'h' * 90}"
    header = tar_members.format_header(name, size, 1_700_000_000)
    info = tarfile.TarInfo.frombuf(header, "utf-8", "strict")
    assert (info.name, info.size, info.mtime, info.isreg()) == (name, size, 1_700_000_000, True)
    assert tar_members.TarReader(io.BytesIO(header), "x").read_header() == (name, size)


def test_a_name_that_no_header_holds_is_one_message() -> None:
    with pytest.raises(PrimusError, match="too long"):
        tar_members.format_header("x" * 300, 1, 0)


def test_folders_are_replaced_as_whole_components_the_longest_first() -> None:
    places = {"<workspace>": "/root/my work/output", "<home>": "/root", "<folder>": "/"}
    names = PathNames(places)
    for text, expected in {
        "/root": "<home>",
        "at /root.": "at <home>.",
        "A=/root/x:/root/y": "A=<home>/x:<home>/y",
        '"/root/my work/output/a"': '"<workspace>/a"',
        "file:///root/x": "file://<home>/x",
        "/mnt/root/x /root2 /root-2 /root.bak ~/root": "/mnt/root/x /root2 /root-2 /root.bak ~/root",
        "/etc/x": "/etc/x",
    }.items():
        assert names.replace(text) == expected
    tree = {"a": ["<home>/x", 1], "b": {"c": "<workspace>/y"}}
    assert restore_paths(tree, {"<workspace>": "/w", "<home>": "/h"}) == {"a": ["/h/x", 1], "b": {"c": "/w/y"}}
