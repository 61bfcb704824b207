"""The lock of a run, as a reader on another host sees it: by the record that the holder renews."""

from __future__ import annotations

import fcntl
import os
import threading
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec import structs

from primus.runs import lock


@pytest.fixture(autouse=True)
def shorten_times(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lock, "RENEWAL_S", 0.02)
    monkeypatch.setattr(lock, "POLL_S", 0.01)
    monkeypatch.setattr(lock, "WATCH_S", 5.0)


def test_a_holder_renews_its_record_until_it_ends(tmp_path: Path) -> None:
    with lock.hold_run(tmp_path) as is_ours:
        assert is_ours
        holder = lock.read_record(tmp_path / lock.FILE)
        assert holder is not None
        assert lock.is_renewed(tmp_path, holder)
        again = lock.read_record(tmp_path / lock.FILE)
        assert again is not None and lock.is_renewed(tmp_path, again), "not only once"
    assert lock.read_record(tmp_path / lock.FILE) is None
    started = time.monotonic()
    assert not lock.is_renewed(tmp_path, holder)
    assert time.monotonic() - started < lock.WATCH_S / 2, "an ended holder is told at once"


def test_a_record_that_stays_the_same_is_of_a_dead_holder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lock, "WATCH_S", 0.1)
    monkeypatch.setattr(lock, "RENEWAL_S", 60.0)
    with lock.hold_run(tmp_path):
        holder = lock.read_record(tmp_path / lock.FILE)
        assert holder is not None and not lock.is_renewed(tmp_path, holder)
        assert lock.is_renewed(tmp_path, structs.replace(holder, renewal=holder.renewal - 1))


@pytest.mark.parametrize(("age_s", "is_found"), [(-200, True), (200, True), (-400, False), (400, False)])
def test_a_record_of_another_host_counts_while_it_is_young_by_a_clock_that_may_be_ahead(
    tmp_path: Path, age_s: int, is_found: bool
) -> None:
    holder = lock.LockHolder(host="elsewhere", pid=7)
    (tmp_path / lock.FILE).write_bytes(msgspec.json.encode(holder))
    os.utime(tmp_path / lock.FILE, times=(0, time.time() - age_s))
    assert lock.find_holder(tmp_path) == (holder if is_found else None)


def test_a_renewal_that_is_under_way_at_the_end_precedes_the_emptying(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writing, emptied, write, empty = threading.Event(), threading.Event(), lock._write_record, os.ftruncate
    alive: list[bool] = []

    def write_late(file: int, renewal: int) -> None:
        if renewal:
            writing.set()
            emptied.wait(0.2)
        write(file, renewal)

    def empty_file(*arguments: Any) -> None:
        alive.extend(thread.name == "run-lock" for thread in threading.enumerate())
        empty(*arguments)
        emptied.set()

    monkeypatch.setattr(lock, "_write_record", write_late)
    monkeypatch.setattr(os, "ftruncate", empty_file)
    with lock.hold_run(tmp_path):
        assert writing.wait(5)
    assert alive and not any(alive), "no renewal can follow"
    assert lock.read_record(tmp_path / lock.FILE) is None


def test_a_workspace_is_held_for_one_command_at_a_time_and_needs_no_permission(tmp_path: Path) -> None:
    with lock.hold_workspace(tmp_path / "new"):
        (file,) = (tmp_path / "new").iterdir()
        with file.open("w") as other:
            assert not lock.lock_file(other, fcntl.LOCK_EX, tries=1)
    with file.open("w") as other:
        assert lock.lock_file(other, fcntl.LOCK_EX, tries=1)
    with lock.hold_workspace(file / "below a file"):  # gives no protection, and no error
        pass
