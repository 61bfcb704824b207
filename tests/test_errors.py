"""An error says what is wrong and what to do, and ends the command with its code."""

from __future__ import annotations

import signal
from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st

from primus import errors
from primus.errors import (
    PrimusError,
    UnfitError,
    UsageError,
    did_you_mean,
    edit_distance,
    escape_controls,
    find_nearest,
)


@pytest.mark.parametrize(("kind", "code"), [(PrimusError, 1), (UsageError, 2), (UnfitError, 3)])
def test_each_kind_has_its_exit_code(kind: type[PrimusError], code: int) -> None:
    assert kind("no").exit_code == code
    assert isinstance(kind("no"), PrimusError)


def test_exit_codes_are_those_of_the_page_and_of_the_shell() -> None:
    codes = (errors.EXIT_OK, errors.EXIT_FAILED, errors.EXIT_USAGE, errors.EXIT_UNFIT)
    assert codes == (0, 1, 2, 3)
    assert errors.EXIT_TIMED_OUT == 124, "timeout(1)"
    assert errors.EXIT_INTERRUPTED == 128 + signal.SIGINT


def test_the_hint_stands_below_the_problem() -> None:
    assert str(PrimusError("no disk", "buy one")) == "no disk\n  buy one"
    assert str(PrimusError("no disk")) == "no disk"


@pytest.mark.parametrize(
    ("word", "name"),
    [
        ("trian-iters", "train_iters"),
        ("TRAIN_ITERS", "train_iters"),
        ("train", "train_iters"),
        ("zebra", None),
        ("", None),
    ],
)
def test_the_nearest_name_is_found_over_case_and_dashes(word: str, name: str | None) -> None:
    assert find_nearest(word, ["train_iters", "lr"]) == name


def test_a_hint_names_the_nearest_or_all() -> None:
    assert did_you_mean("dirct", ["direct", "slurm"]) == "did you mean 'direct'?"
    assert did_you_mean("x", ["slurm", "direct"]) == "valid: direct, slurm"
    assert did_you_mean("x", []) == ""


def test_a_hint_about_many_names_shows_similar_ones_or_some() -> None:
    names = [f"llama{n}_8B" for n in range(30)]
    assert did_you_mean("lama3_9", names).startswith("similar: llama3_8B, ")
    assert did_you_mean("???", names).endswith(" and 10 more")


@pytest.mark.parametrize(
    ("word", "name"),
    [
        ("no_load_rng", None),
        ("profile", None),
        ("seqlength", "seq_length"),
        ("sqe_length", "seq_length"),
        ("lrr", "lr"),
        ("l", None),
        ("train", None),
        ("train_d", "train_data_path"),
    ],
)
def test_a_name_that_is_not_near_is_not_suggested(word: str, name: str | None) -> None:
    valid = ["q_lora_rank", "lr", "seq_length", "train_iters", "train_data_path", "split"]
    assert find_nearest(word, valid) == name


@given(st.text(st.sampled_from("ab_"), max_size=6), st.text(st.sampled_from("ab_"), max_size=6))
def test_the_edit_distance_is_one_of_alignments(a: str, b: str) -> None:
    @cache
    def plain(i: int, j: int) -> int:
        if not i or not j:
            return i + j
        found = min(plain(i - 1, j) + 1, plain(i, j - 1) + 1, plain(i - 1, j - 1) + (a[i - 1] != b[j - 1]))
        swapped = i > 1 and j > 1 and a[i - 1] == b[j - 2] and a[i - 2] == b[j - 1]
        return min(found, plain(i - 2, j - 2) + 1) if swapped else found

    assert edit_distance(a, b, limit=20) == plain(len(a), len(b))
    assert edit_distance(a, b, limit=1) > 1 or plain(len(a), len(b)) <= 1


@pytest.mark.parametrize(("a", "b"), [("abcd", "bacd"), ("abcd", "acbd"), ("abcd", "abdc"), ("train", "trian")])
def test_two_letters_that_changed_places_are_one_edit(a: str, b: str) -> None:
    assert edit_distance(a, b, limit=3) == edit_distance(b, a, limit=3) == 1


def test_letters_that_changed_places_over_another_are_more_than_one_edit() -> None:
    assert edit_distance("abcd", "cbad", limit=3) == 2
    assert edit_distance("ca", "abc", limit=3) == 3, "no letter is edited twice"


def test_what_a_terminal_would_obey_is_spelled_out() -> None:
    assert escape_controls("a\x1b[2J\n\tb\u202e\ud800\xe9") == "a\\x1b[2J\n\tb\\u202e\\ud800\xe9"
