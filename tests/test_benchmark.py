"""Sizes and shares are read as they are typed, and wrong ones are refused."""

from __future__ import annotations

import pytest

from primus.benchmark import parse_share, parse_sizes
from primus.benchmarks.train import summarize_steps
from primus.errors import UsageError


@pytest.mark.parametrize(
    ("text", "sizes"),
    [
        ("4096", [4096]),
        ("1024:16384:x2", [1024, 2048, 4096, 8192, 16384]),
        ("100:350:+100", [100, 200, 300]),
        ("100:350:100,7", [100, 200, 300, 7]),
        ("8:64", [8, 16, 32, 64]),
        ("8:8", [8]),
    ],
)
def test_sizes_are_numbers_lists_and_ranges(text: str, sizes: list[int]) -> None:
    assert parse_sizes(text, "-M") == sizes


@pytest.mark.parametrize("text", ["0", "-4", "", "4k", "0:8", "8:4", "4:64:x1", "4:64:0", "1,,2", "\u0664"])
def test_a_size_that_no_machine_can_run_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match=r"-M"):
        parse_sizes(text, "-M")


def test_a_share_is_a_percentage_or_a_fraction() -> None:
    assert parse_share("5%", "--tolerance") == parse_share("0.05", "--tolerance") == 0.05
    for text in ("5", "-1%", "nan", "100%", "x"):
        with pytest.raises(UsageError, match="--tolerance"):
            parse_share(text, "--tolerance")


def test_the_rate_of_training_is_that_of_the_steps_after_the_warm_up() -> None:
    row = summarize_steps([9.0, 4.0, 2.0, 1.5] + [1.0] * 12, 100.0, {})
    assert row.value == pytest.approx(100.0) and row.interval == (pytest.approx(100.0), pytest.approx(100.0))
    assert row.timing is not None and (row.timing.n, row.timing.max_s) == (12, 1.0)
    assert summarize_steps([9.0, 1.0, 1.0], 100.0, {}).problem
