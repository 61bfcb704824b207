from __future__ import annotations

import xml.etree.ElementTree as ElementTree

from primus.report import histogram
from primus.report.charts import select_wide
from primus.report.histogram import HistogramBar

BARS = [
    HistogramBar(first=0, last=0, count=0, weight=0),
    HistogramBar(first=1, last=1, count=1, weight=1),
    HistogramBar(first=2, last=3, count=400, weight=1000),
    HistogramBar(first=131_072, last=262_143, count=99, weight=2999),
]


def test_bars_of_blocks_are_as_long_as_their_counts() -> None:
    rows = histogram.format_text_histogram(BARS, "documents", "tokens").splitlines()
    assert [row.count("\u2588") for row in rows] == [0, 0, 0, 40, 9]
    assert rows[1].split() == ["0", "0", "0.0%"]
    assert rows[2].split() == ["1", "1", "0.0%", "\u258f"], "one among many is still visible"
    assert rows[4].split()[:5] == ["131,072", "-", "262,143", "99", "75.0%"]


def test_the_chart_has_both_shares_of_every_range() -> None:
    picture = ElementTree.fromstring(select_wide(histogram.draw_histogram(BARS, "a <title>", "documents", "tokens")))
    name = "{http://www.w3.org/2000/svg}"
    heights = {
        kind: [float(each.get("height", 0)) for each in picture.iter(f"{name}rect") if each.get("class") == kind][:4]
        for kind in ("fill c0", "fill c1")
    }
    assert heights == {"fill c0": [0.0, 0.7, 260.0, 64.3], "fill c1": [0.0, 0.1, 81.2, 243.7]}
    words = [each.text for each in picture.iter(f"{name}text")]
    assert "a <title>" in words and "128 Ki" in words and "80%" in words


def test_no_things_make_an_empty_chart() -> None:
    assert select_wide(histogram.draw_histogram([], "nothing", "documents", "tokens")).startswith("<svg")
    assert histogram.format_text_histogram([], "documents", "tokens").split() == [
        "tokens",
        "documents",
        "of",
        "all",
        "tokens",
    ]
