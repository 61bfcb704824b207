"""An error says what is wrong and what to do, and ends the command with its code."""

from __future__ import annotations

import pytest

from primus.errors import PrimusError, UnfitError, UsageError, did_you_mean, nearest


@pytest.mark.parametrize(("kind", "code"), [(PrimusError, 1), (UsageError, 2), (UnfitError, 3)])
def test_each_kind_has_its_exit_code(kind: type[PrimusError], code: int) -> None:
    assert kind("no").exit_code == code
    assert isinstance(kind("no"), PrimusError)


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
    assert nearest(word, ["train_iters", "lr"]) == name


def test_a_hint_names_the_nearest_or_all() -> None:
    assert did_you_mean("dirct", ["direct", "slurm"]) == "did you mean 'direct'?"
    assert did_you_mean("x", ["slurm", "direct"]) == "valid: direct, slurm"
    assert did_you_mean("x", []) == ""
