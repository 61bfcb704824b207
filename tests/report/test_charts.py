"""Charts and maps of machines fit the screen: a real browser lays them out in frames of several widths."""

from __future__ import annotations

import html
import json
import re
from pathlib import Path
from typing import Any

import pytest
from tests import browser

from primus.machine.assumed_machine import build_assumed_machine
from primus.machine.topology import build_topology
from primus.report import page
from primus.report.charts import draw_area_chart, draw_line_chart, draw_share_bar
from primus.report.histogram import HistogramBar, draw_histogram
from primus.report.page import Html
from primus.report.point_charts import (
    ChartPoint,
    PlacedPoint,
    ValuePair,
    draw_interval_chart,
    draw_paired_dots,
    draw_scatter,
)
from primus.report.topology_picture import draw_topology_for_page

WIDTHS = (360, 400, 800, 1400)
MEASURE = """
<script>
onload = () => {
  const found = [...document.querySelectorAll("iframe")].map(frame => {
    const inner = frame.contentDocument, boxes = [inner.documentElement, ...inner.querySelectorAll("section")];
    const scroll = Math.max(...boxes.map(each => each.scrollWidth - each.clientWidth));
    const pictures = [...inner.querySelectorAll("svg.chart, svg.topology")];
    const charts = pictures.filter(each => each.getBoundingClientRect().width > 0);
    const texts = charts.flatMap(chart => [...chart.querySelectorAll("text")].map(text => {
      const box = text.getBoundingClientRect(), frame = chart.getBoundingClientRect();
      return [text.textContent, parseFloat(getComputedStyle(text).fontSize) * chart.getScreenCTM().a,
              frame.left - box.left, box.right - frame.right, box.bottom - frame.bottom];
    }));
    return {charts: charts.map(each => each.getAttribute("class")), scroll, texts};
  });
  const text = JSON.stringify(found).replace(/[&<]/g, c => "&#" + c.charCodeAt() + ";");
  document.body.innerHTML = "<pre>" + text + "</pre>";
};
</script>
"""
LABELS = ("native on 2 x AMD Instinct MI300X", "megatron on 8 x AMD Instinct MI300X with all of it", "jax")


def draw_all() -> list[Html]:
    steps = [(float(step), 12_000.0 + step % 7) for step in range(1, 3001)]
    shares = [("computation", 50.0), ("exposed communication", 20.0), ("waiting for data", 10.0), ("host", 3.0)]
    samples = [(time * 10.0, [100.0, 50.0 + time % 9]) for time in range(200)]
    points = [
        ChartPoint(label=label, value=9000.0 + place, low=8500.0, high=9500.0, kind=place, note="[8,500, 9,500]")
        for place, label in enumerate(LABELS)
    ]
    pair = ValuePair(label=f"{LABELS[0]} / {LABELS[1]}", a=9000.0, b=4000.0, note="2.25; " + 9 * "not a fair pair, ")
    placed = [PlacedPoint(label=label, x=1000.0 * (1 + place), y=5.0, kind=place) for place, label in enumerate(LABELS)]
    bars = [
        HistogramBar(first=1 << power, last=(2 << power) - 1, count=10 * (power + 1), weight=(power + 1) << power)
        for power in range(20)
    ]
    return [
        draw_line_chart("Throughput of the run", [(label, steps) for label in LABELS], "tokens/s", "step"),
        draw_line_chart("Loss", [("loss", [(1.0, 2.5), (2.0, 2.25)])], "loss", "s", shade=(1.0, 1.5, "warm-up")),
        draw_share_bar("Timeline of the profiled steps", shares),
        draw_area_chart("Memory of the AMD Instinct MI300X", ["parameters", "optimizer state"], samples, "MiB"),
        draw_interval_chart("Throughput of a device, with 95 % intervals", "tokens/s", points, limit=(9900.0, "peak")),
        draw_paired_dots("Pairs: A by B", "tokens/s of a device", ("A", "B"), [pair, pair]),
        draw_histogram(bars, "a file: 7,340,032 tokens in 1,408 documents", "documents", "tokens"),
        draw_scatter("Speed and energy", "J per 10^6 tokens", "tokens/s", placed, joined=True),
    ]


def measure_page(text: str, folder: Path) -> list[tuple[int, dict[str, Any]]]:
    """What a browser shows of a page on a screen of each width."""
    inner = html.escape(text)
    frames = "".join(f'<iframe srcdoc="{inner}" style="border:0;width:{width}px"></iframe>' for width in WIDTHS)
    outer = folder / "frames.html"
    outer.write_text(f"<!doctype html><meta charset=utf-8><body>{frames}{MEASURE}")
    shown = re.search(r"<pre>(.*)</pre>", browser.dom(outer), re.DOTALL)
    assert shown is not None
    return list(zip(WIDTHS, json.loads(html.unescape(shown[1])), strict=True))


def test_charts_fit_every_screen_with_legible_labels(tmp_path: Path) -> None:
    pictures = draw_all()
    for width, found in measure_page(page.format_page("Charts", [("", page.join_fragments(*pictures))]), tmp_path):
        kind = "narrow" if width < 800 else "wide"
        assert found["charts"] == [f"chart {kind}"] * len(pictures), width
        assert found["scroll"] <= 0, width
        for text, size_px, *overhangs in found["texts"]:
            assert size_px >= 11, (width, text, size_px)
            assert max(overhangs) <= 1, (width, text, overhangs)


@pytest.mark.parametrize(("model", "nic"), [("mi300x:8", "ainic"), ("mi210:8", None), ("h100:8", "mellanox")])
def test_maps_of_machines_fit_every_screen_with_legible_labels(model: str, nic: str | None, tmp_path: Path) -> None:
    facts = build_assumed_machine(model, nic)
    picture = draw_topology_for_page(facts, build_topology(facts))
    text = page.format_page("Map", [("", page.make_element("div", picture, class_="wide"))])
    for width, found in measure_page(text, tmp_path):
        assert found["charts"] == [f"topology {'one-column' if width < 1216 else 'two-columns'}"], width
        assert found["scroll"] <= 0, width
        for label, size_px, *overhangs in found["texts"]:
            assert size_px >= 10.9, (width, label, size_px)
            assert max(overhangs) <= 1, (width, label, overhangs)


def test_legends_are_below_the_curves_and_the_narrow_drawing_adds_no_size_to_pictures() -> None:
    wide, narrow = re.findall(r"<svg.*?</svg>", draw_all()[0], re.DOTALL)
    assert 'width="880"' in wide and ' height="' in wide.partition(">")[0]
    assert " width=" not in narrow.partition(">")[0] and "<style>" not in narrow
    for drawing in (wide, narrow):
        groups = [float(height) for height in re.findall(r"translate\(0 ([\d.]+)\)", drawing)]
        assert max(groups) > 210, "the height of the curves"
