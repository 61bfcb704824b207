"""Tables for terminals."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios

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


WIDE = (["name", "size", "reason"], [["a" * 30, "12", "word " * 12 + "https://" + "x" * 40], ["b", "3", ""]])


def format_at(columns: int, table: tuple[list[str], list[list[str]]]) -> list[str]:
    """Lines of a table on a terminal of a number of columns."""
    code = f"from primus.report.table import format_table; print(format_table(*{table!r}, right=[1], indent=2))"
    return [line.rstrip() for line in run_at_terminal([sys.executable, "-c", code], columns)]


def run_at_terminal(argv: list[str], columns: int) -> list[str]:
    """Lines that a command writes to a terminal of a number of columns."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    environ = {name: value for name, value in os.environ.items() if name != "COLUMNS"}
    process = subprocess.Popen(argv, stdout=theirs, stdin=subprocess.DEVNULL, env=environ)
    os.close(theirs)
    found = b""
    with contextlib.suppress(OSError):  # a terminal whose other side is closed
        while part := os.read(ours, 65536):
            found += part
    os.close(ours)
    assert process.wait(timeout=60) == 0
    return found.decode().splitlines()


def test_a_row_that_is_wider_than_the_terminal_takes_several_lines() -> None:
    lines = format_at(70, WIDE)
    assert max(map(len, lines)) <= 70
    assert [line.strip() for line in lines[:2]] == [
        "name                            size  reason",
        f"{'a' * 30}    12  word word word word word word",
    ]
    assert lines[-1] == f"  b{' ' * 34}3"
    narrow = format_at(40, WIDE)
    assert max(map(len, narrow)) <= 40
    assert narrow[0] == f"  name{' ' * 28}size" and narrow[1] == "      reason"
    assert narrow[-1] == f"  b{' ' * 34}3", "an empty column has no line"
    for found in (lines, narrow):
        assert "https://" + "x" * 40 in re.sub(r"\s", "", "".join(found))
    assert [line[2:] for line in format_at(200, WIDE)] == format_table(*WIDE, right=[1]).splitlines()


@pytest.mark.parametrize("words", ["", "direct", "slurm", "direct -- data encode", "direct -- runs"])
def test_help_wraps_at_words_on_a_terminal_of_80_columns(words: str) -> None:
    narrow, wide = (
        run_at_terminal([sys.executable, "-m", "primus", *words.split(), "--help"], columns) for columns in (80, 200)
    )
    assert max(map(len, narrow)) <= 80 < max(map(len, wide)) <= 122
    # A command is broken by backslashes.
    assert [word for line in narrow for word in line.split() if word != "\\"] == " ".join(wide).split()


def test_columns_of_text_become_narrower_before_a_row_takes_several_lines() -> None:
    table = (["change", "size", "reason"], [["stop other processes " * 3, "12", "threads wait " * 4]])
    assert format_at(60, table)[:2] == [
        "  change                     size  reason",
        "  stop other processes stop    12  threads wait threads wait",
    ]


def test_a_narrow_terminal_does_without_spare_columns() -> None:
    code = (
        "from primus.report.table import format_table; print(format_table(list('abc'), [['x' * 20] * 3], spare=[1, 0]))"
    )
    for columns, kept in ((64, "abc"), (63, "ac"), (41, "c")):
        assert run_at_terminal([sys.executable, "-c", code], columns)[0].split() == list(kept)


@pytest.mark.parametrize("words", ["patches list", "benchmark list", "engines"])
def test_listings_fit_a_terminal_of_80_columns(words: str) -> None:
    argv = [sys.executable, "-m", "primus", "direct", "--", *words.split()]
    assert max(map(len, run_at_terminal(argv, 80))) <= 80
    piped = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=True).stdout
    assert max(map(len, piped.splitlines())) > 80


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
