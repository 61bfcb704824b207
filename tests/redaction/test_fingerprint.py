"""Fingerprints tell equal values from different ones, and nothing else without the user's key."""

from __future__ import annotations

import hashlib
import stat
from pathlib import Path

import pytest

from primus.redaction.fingerprint import KEY_NAME, FingerprintKey, are_comparable, is_fingerprint


@pytest.fixture
def key(tmp_path: Path) -> FingerprintKey:
    return make_key(tmp_path / "state")


def make_key(folder: Path) -> FingerprintKey:
    key = FingerprintKey()
    key.use_folder(folder)
    return key


def test_equal_values_have_equal_fingerprints_and_others_do_not(key: FingerprintKey) -> None:
    first = key.compute("MODE", "1234")
    assert is_fingerprint(first)
    assert first == key.compute("MODE", "1234")
    assert first != key.compute("MODE", "1235")
    assert first != key.compute("OTHER", "1234"), "two variables with one value do not show it"


def test_a_later_command_of_the_user_has_the_key_of_the_first_run(tmp_path: Path, key: FingerprintKey) -> None:
    first = key.compute("MODE", "1234")
    key.keep()
    assert key.compute("MODE", "1234") == first, "the key of the process is the one that is kept"
    assert make_key(tmp_path / "state").compute("MODE", "1234") == first
    file = tmp_path / "state" / KEY_NAME
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert list(file.parent.iterdir()) == [file]


def test_a_process_that_comes_second_takes_the_key_of_the_first(tmp_path: Path, key: FingerprintKey) -> None:
    second = make_key(tmp_path / "state")
    own = second.compute("MODE", "1234")
    key.keep()
    assert own != key.compute("MODE", "1234")
    second.keep()
    assert second.compute("MODE", "1234") == key.compute("MODE", "1234")


def test_a_fingerprint_without_its_key_cannot_be_found_by_trying_values(key: FingerprintKey) -> None:
    digest = key.compute("PIN_OF_SITE", "0042")[-11:-1]
    for value in range(10_000):
        for text in (f"{value:04}", f"PIN_OF_SITE={value:04}"):
            assert not hashlib.sha256(text.encode()).hexdigest().startswith(digest)


def test_fingerprints_of_two_keys_are_not_compared(tmp_path: Path, key: FingerprintKey) -> None:
    other = make_key(tmp_path / "other")
    mine, theirs = key.compute("MODE", "1"), other.compute("MODE", "1")
    assert not are_comparable(mine, theirs)
    assert are_comparable(mine, key.compute("MODE", "2"))
    assert are_comparable(mine, "absent")
    assert are_comparable("1", "2")


def test_a_folder_that_cannot_be_written_leaves_a_key_for_this_process(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    key = make_key(tmp_path / "file" / "state")
    first = key.compute("MODE", "1")
    key.keep()
    assert key.compute("MODE", "1") == first
    assert make_key(tmp_path / "file" / "state").compute("MODE", "1") != first


@pytest.mark.parametrize("content", ["", "abcd", "not hexadecimal"])
def test_a_damaged_key_is_not_used(tmp_path: Path, content: str) -> None:
    (tmp_path / KEY_NAME).write_text(content)
    first, second = (make_key(tmp_path).compute("MODE", "1") for _ in range(2))
    assert first != second
