"""Tables for terminals."""

from __future__ import annotations

from primus.report.table import format_table


def test_a_row_is_one_line_whatever_its_cells_hold() -> None:
    lines = format_table(["name", "size"], [["a\nb\x1b[31m", "3"], ["c", "12"]], right=(1,)).split("\n")
    assert [line.split() for line in lines] == [["name", "size"], ["a\\nb\\x1b[31m", "3"], ["c", "12"]]
    assert len({len(line) for line in lines}) == 1, "the columns are aligned"
