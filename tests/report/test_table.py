"""Tables for terminals."""

from __future__ import annotations

import pytest

from primus.report.table import (
    format_duration,
    format_number,
    format_size,
    format_table,
    format_time,
    format_unit,
    format_value_name,
)


def test_a_row_is_one_line_whatever_its_cells_hold() -> None:
    lines = format_table(["name", "size"], [["a\nb\x1b[31m", "3"], ["c", "12"]], right=(1,)).split("\n")
    assert [line.split() for line in lines] == [["name", "size"], ["a\\nb\\x1b[31m", "3"], ["c", "12"]]
    assert len({len(line) for line in lines}) == 1, "the columns are aligned"


def test_columns_are_flush_left_or_right() -> None:
    assert format_table(["run", "loss"], [["night", "5"], ["a", "10.25"]], right=[1]) == (
        "run     loss\nnight      5\na      10.25"
    )


@pytest.mark.parametrize(
    ("value", "shown"), [(None, "-"), (0.123456, "0.1235"), (999.94, "999.9"), (1000.0, "1,000"), (-1234.5, "-1,234")]
)
def test_numbers_have_four_digits_and_large_ones_no_decimals(value: float | None, shown: str) -> None:
    assert format_number(value) == shown


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("tokens_per_s", "tokens/s"),
        ("busbw_gb_per_s", "busbw GB/s"),
        ("bandwidth_mb_per_s", "bandwidth MB/s"),
        ("latency_us", "latency \u00b5s"),
        ("s", "s"),
        ("tflops", "TFLOP/s"),
        ("grad_norm", "grad norm"),
    ],
)
def test_names_of_values_end_with_their_unit(name: str, shown: str) -> None:
    assert format_value_name(name) == shown


def test_a_single_letter_is_a_name_and_no_unit_and_others_stay() -> None:
    assert (format_unit("gb_per_s"), format_unit("steps")) == ("GB/s", "steps")
    assert format_value_name("b") == "b"


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [(None, "-"), (0.4, "0 s"), (59.4, "59 s"), (60, "1:00"), (185, "3:05"), (3599.6, "1:00:00"), (7385, "2:03:05")],
)
def test_durations_are_seconds_minutes_or_hours(seconds: float | None, shown: str) -> None:
    assert format_duration(seconds) == shown


@pytest.mark.parametrize(
    ("count", "shown"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (1536 * 1024, "1.5 MiB"),
        (1 << 30, "1.0 GiB"),
        (3 << 40, "3.0 TiB"),
    ],
)
def test_sizes_are_in_binary_units(count: int, shown: str) -> None:
    assert format_size(count) == shown


def test_times_are_local_to_the_second() -> None:
    assert format_time(None) == "-"
    assert len(format_time(1_700_000_000.9)) == len("2023-11-14 22:13:20")
