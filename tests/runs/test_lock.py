"""The lock of a run, as a reader on another host sees it: by the record that the holder renews."""

from __future__ import annotations

import fcntl
import time
from pathlib import Path

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


def test_a_workspace_is_held_for_one_command_at_a_time_and_needs_no_permission(tmp_path: Path) -> None:
    with lock.hold_workspace(tmp_path / "new"):
        (file,) = (tmp_path / "new").iterdir()
        with file.open("w") as other:
            assert not lock.lock_file(other, fcntl.LOCK_EX, tries=1)
    with file.open("w") as other:
        assert lock.lock_file(other, fcntl.LOCK_EX, tries=1)
    with lock.hold_workspace(file / "below a file"):  # gives no protection, and no error
        pass
