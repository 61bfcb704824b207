"""Pictures as PNG files, by a real browser."""

from __future__ import annotations

import shutil
import struct
from pathlib import Path

import pytest

from primus.report.picture_files import BROWSERS, SCALE, write_pictures
from primus.report.point_charts import ChartPoint, draw_interval_chart


@pytest.mark.skipif(not any(map(shutil.which, BROWSERS)), reason="no browser is installed")
def test_a_picture_is_written_in_its_own_size(tmp_path: Path) -> None:
    points = [ChartPoint(label="a", value=2.0, low=1.5, high=2.5), ChartPoint(label="b", value=1.0, is_hollow=True)]
    written = write_pictures({"speed": draw_interval_chart("Speed", "tokens/s", points)}, tmp_path / "pictures")
    assert written == [tmp_path / "pictures/speed.png"]
    data = written[0].read_bytes()
    assert data.startswith(b"\x89PNG")
    assert struct.unpack(">II", data[16:24]) == (880 * SCALE, 108 * SCALE)
