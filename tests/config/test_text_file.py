"""What has no end is refused, wherever a user may name a file."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from primus.config import text_file
from primus.config.text_file import check_has_end, read_config_text
from primus.config.token_files import resolve_prefix
from primus.data.readers.files import find_files
from primus.data.tokenizers.locate import read_tokenizer
from primus.errors import UsageError


@pytest.mark.parametrize("path", ["/dev/zero", "/dev/null", "/proc/kmsg", "/proc/self/mem", "/proc/1/cmdline"])
def test_a_device_or_a_file_of_the_kernel_is_refused_by_each_reader_of_files(tmp_path: Path, path: str) -> None:
    for name in ("x.jsonl", "x.json", "x.yaml", "x.idx"):
        (tmp_path / name).symlink_to(path)
    refusal = "a device, not a file|a file of the kernel"
    with pytest.raises(UsageError, match=refusal):
        find_files(str(tmp_path / "x.jsonl"))
    with pytest.raises(UsageError, match=refusal):
        read_config_text(tmp_path / "x.yaml", "x.yaml")
    with pytest.raises(UsageError, match=f"train_data_path: .*x.idx: ({refusal})"):
        resolve_prefix(str(tmp_path / "x"), "train_data_path")
    with pytest.raises(UsageError, match=refusal):
        read_tokenizer(str(tmp_path / "x.json"))


def test_pipes_files_behind_descriptors_and_absent_files_pass(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("a: 1\n")
    with (tmp_path / "a").open() as file:
        check_has_end(Path(f"/proc/self/fd/{file.fileno()}"), "a")
    reading, writing = os.pipe()
    os.write(writing, b"b: 2\n")
    os.close(writing)
    assert read_config_text(Path(f"/dev/fd/{reading}"), "pipe") == "b: 2\n"
    os.close(reading)
    check_has_end(tmp_path / "absent", "absent")


@pytest.mark.parametrize("kind", [stat.S_IFBLK, stat.S_IFCHR])
def test_drives_and_terminals_are_devices(monkeypatch: pytest.MonkeyPatch, kind: int) -> None:
    monkeypatch.setattr(text_file.os, "stat", lambda path: os.stat_result((kind | 0o600, *[0] * 9)))
    with pytest.raises(UsageError, match="/dev/sda: a device, not a file"):
        check_has_end(Path("/dev/sda"), "/dev/sda")
