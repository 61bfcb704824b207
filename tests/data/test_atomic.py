from __future__ import annotations

import errno
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from fakes.disk_steps import record_disk_steps
from primus.data import atomic
from primus.errors import PrimusError

HOLDER = """
import sys
from pathlib import Path
from primus.data import atomic
with atomic.hold_lock(Path(sys.argv[1]), 5):
    print("held", flush=True)
    sys.stdin.read()
"""


def hold(path: Path) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout
    assert process.stdout.readline() == "held\n"
    return process


def test_waiting_for_a_lock_has_an_end_and_names_the_holder(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    process = hold(path)
    told: list[str] = []
    with pytest.raises(PrimusError, match=f"process {process.pid} on"), atomic.hold_lock(path, 0.3, told.append):
        pass
    assert len(told) == 1
    process.communicate(timeout=10)
    assert not path.exists()


def test_a_lock_whose_holder_was_killed_is_free(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    process = hold(path)
    process.kill()
    process.communicate(timeout=10)
    with atomic.hold_lock(path, 5):
        assert path.exists()
    assert not path.exists()


def test_a_lock_on_a_file_that_its_holder_has_removed_does_not_count(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT)
    try:
        assert atomic._try_lock(descriptor, path)
        path.unlink()
        assert not atomic._try_lock(descriptor, path)
        path.touch()
        assert not atomic._try_lock(descriptor, path)
    finally:
        os.close(descriptor)


def test_only_one_holds_a_lock_at_a_time(tmp_path: Path) -> None:
    inside = 0
    most = 0
    taken = []

    def work() -> None:
        nonlocal inside, most
        for _ in range(5):
            with atomic.hold_lock(tmp_path / "lock", 30):
                inside += 1
                most = max(most, inside)
                taken.append(1)
                inside -= 1

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert (len(taken), most) == (20, 1)


def test_staged_files_have_their_names_only_once_published(tmp_path: Path) -> None:
    with atomic.stage_files({tmp_path / "a": b"1", tmp_path / "b": b"2"}) as publish:
        assert not (tmp_path / "a").exists()
        publish()
        assert [(tmp_path / name).read_bytes() for name in "ab"] == [b"1", b"2"]
    with atomic.stage_files({tmp_path / "c": b"3"}):
        pass
    assert sorted(file.name for file in tmp_path.iterdir()) == ["a", "b"]


def test_each_staged_file_is_on_disk_before_its_name_and_its_name_before_the_next_file(tmp_path: Path) -> None:
    with record_disk_steps(tmp_path) as steps, atomic.stage_files({tmp_path / "a": b"1", tmp_path / "b": b"2"}) as go:
        go()
    a, b = (atomic.build_temporary_path(tmp_path / name).name for name in "ab")
    assert steps == [
        *(("sync", a), ("sync", b)),
        *(("rename", "a"), ("sync", "."), ("rename", "b"), ("sync", ".")),
    ]


def test_a_deleted_file_is_gone_from_the_disk_before_anything_else_happens(tmp_path: Path) -> None:
    (tmp_path / "old").touch()
    with record_disk_steps(tmp_path) as steps:
        atomic.delete_file(tmp_path / "old")
        atomic.delete_file(tmp_path / "absent")
    assert steps == [("delete", "old"), ("sync", ".")]


def test_of_the_temporary_files_only_those_of_the_name_are_stale(tmp_path: Path) -> None:
    for name in ("data.bin.tmp.7", "data.idx.tmp.8", "data2.bin.tmp.9", "data.bin", "database.tmp.1"):
        (tmp_path / name).touch()
    atomic.remove_stale(tmp_path, "data")
    assert {file.name for file in tmp_path.iterdir()} == {"data2.bin.tmp.9", "data.bin", "database.tmp.1"}


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO])
def test_a_full_disk_or_quota_is_told_with_the_space_that_is_free(tmp_path: Path, number: int) -> None:
    problem = atomic.build_write_error(tmp_path / "new" / "data.bin", OSError(number, os.strerror(number))).problem
    assert os.strerror(number) in problem and ("MB are free" in problem) == (number != errno.EIO)
