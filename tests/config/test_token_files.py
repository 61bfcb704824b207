"""What users may write for token files."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from primus.config.token_files import find_prefixes, parse_weighted_prefixes, resolve_prefix
from primus.errors import UsageError


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, which has token files."""
    monkeypatch.chdir(tmp_path)
    for name in ("a.bin", "a.idx", "b_text_document.idx", "two words.idx", "notes.txt", "sub.d/c.idx"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    return tmp_path


@pytest.mark.parametrize("given", ["a", "a.bin", "a.idx", "./a"])
def test_a_prefix_is_found_with_and_without_its_extension(folder: Path, given: str) -> None:
    assert resolve_prefix(given, "key") == Path("a")


def test_what_is_given_for_one_prefix_may_leave_out_the_usual_end_or_have_spaces(folder: Path) -> None:
    assert parse_weighted_prefixes("b", "key") == [(Path("b_text_document"), None)]
    assert parse_weighted_prefixes("two words", "key") == [(Path("two words"), None)]
    assert parse_weighted_prefixes("a b", "key") == [(Path("a"), None), (Path("b_text_document"), None)]


def test_a_blend_in_one_string_may_be_longer_than_the_name_of_a_file(folder: Path) -> None:
    names = [f"corpus{number}" for number in range(200)]
    for name in names:
        (folder / f"{name}.idx").touch()
    assert [str(path) for path, _ in parse_weighted_prefixes(" ".join(names), "key")] == names


@pytest.mark.parametrize("given", [".", "..", "/", "c", "none/a", "a/b"])
def test_what_is_no_prefix_is_an_error(folder: Path, given: str) -> None:
    with pytest.raises(UsageError, match="key: no such data"):
        resolve_prefix(given, "key")


def test_the_prefixes_of_words_folders_and_patterns_are_found_once_in_order(folder: Path) -> None:
    assert find_prefixes(["b", "a.bin", "a"]) == [Path("b_text_document"), Path("a")]
    assert find_prefixes(["sub.d", "[ab]*"]) == [Path("sub.d/c"), Path("a"), Path("b_text_document")]
    for word in ("sub.d/*.txt", "x*"):
        with pytest.raises(UsageError, match=r"no \.bin or \.idx there"):
            find_prefixes([word])


def test_a_name_that_cannot_be_printed_is_an_error(folder: Path) -> None:
    Path(os.fsdecode(b"sub.d/\xff.idx")).touch()
    with pytest.raises(UsageError, match="cannot be printed"):
        find_prefixes(["sub.d"])
