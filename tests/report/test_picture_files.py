"""Pictures as PNG files, by a real browser."""

from __future__ import annotations

import re
import shutil
import struct
from itertools import pairwise
from pathlib import Path

import pytest

from primus.report.charts import list_ticks
from primus.report.picture_files import BROWSERS, SCALE, write_pictures
from primus.report.point_charts import ChartPoint, PlacedPoint, draw_interval_chart, draw_scatter


@pytest.mark.skipif(not any(map(shutil.which, BROWSERS)), reason="no browser is installed")
def test_a_picture_is_written_in_its_own_size(tmp_path: Path) -> None:
    points = [ChartPoint(label="a", value=2.0, low=1.5, high=2.5), ChartPoint(label="b", value=1.0, is_hollow=True)]
    written = write_pictures({"speed": draw_interval_chart("Speed", "tokens/s", points)}, tmp_path / "pictures")
    assert written == [tmp_path / "pictures/speed.png"]
    data = written[0].read_bytes()
    assert data.startswith(b"\x89PNG")
    assert struct.unpack(">II", data[16:24]) == (880 * SCALE, 97 * SCALE)


@pytest.mark.parametrize(
    ("low", "high", "labels"),
    [
        (0.0, 0.4, ["0.0", "0.1", "0.2", "0.3", "0.4"]),
        (8.21, 8.93, ["8.4", "8.6", "8.8"]),
        (123.0, 98765.0, ["20,000", "40,000", "60,000", "80,000"]),
        (-3.0, 4.0, ["-2", "0", "2", "4"]),
    ],
)
def test_ticks_of_an_axis_are_round_numbers(low: float, high: float, labels: list[str]) -> None:
    assert [label for _, label in list_ticks(low, high)] == labels
    assert all(low <= value <= high for value, _ in list_ticks(low, high))
    assert [label for _, label in list_ticks(1, 3, whole=True)] == ["1", "2", "3"]


def test_labels_of_points_that_are_near_stand_apart_and_within_the_picture() -> None:
    points = [
        PlacedPoint(label=f"an engine with a name, {number}", x=900 + number, y=800 - number) for number in range(6)
    ]
    chart = str(draw_scatter("Speed and energy", "J", "tokens/s", [*points, PlacedPoint(label="far", x=10, y=10)]))
    found = re.findall(r'<text [^>]*?x="([\d.]+)" y="([\d.]+)"[^>]*>an engine', chart)
    heights = sorted(float(y) for _, y in found)
    assert heights[0] > 44, "below the title"
    assert len(heights) == 6 and min(b - a for a, b in pairwise(heights)) >= 14
    ends = re.findall(r'<text [^>]*?class="end"[^>]*>an engine', chart)
    assert all(float(x) + 7 * 24 < 880 for x, _ in found) or ends, "left of points near the edge"
    far = re.search(r'<text [^>]*?y="([\d.]+)"[^>]*>far', chart)
    mark = re.search(r'<circle [^>]*?cy="([\d.]+)"[^>]*><title>far', chart)
    assert far and mark and float(far[1]) == float(mark[1]) + 4, "a label that meets no other one is beside its point"
