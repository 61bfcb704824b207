"""`runs plot`: a page with a chart for each metric, and a picture of them."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest

import browser
from fakes import cli
from primus.runs.events import EventLog
from primus.runs.store import RunMetadata, RunOutcome, create_run

WORDS = ("direct", "--", "runs", "plot")


@pytest.fixture
def runs(tmp_path: Path) -> list[str]:
    """Two runs of 30 steps, of which one reports no norm of the gradient, and one without steps."""
    names = []
    for number, name in enumerate(("day", "night", "empty")):
        outcome = RunOutcome(state="done", exit_code=0)
        metadata = RunMetadata(
            id=f"2026010{number + 1}_120000-ab12", name=name, task="train pretrain", created=1.0, outcome=outcome
        )
        log = EventLog(create_run(tmp_path / "output" / name / metadata.id, metadata).events)
        for step in range(1, 31) if name != "empty" else ():
            norm = {"grad_norm": 1.0 / step} if name == "day" else {}
            loss = None if step == 20 else 8.0 / step + number
            log.append("step", step=step, loss=loss, tokens_per_s=1000.0 + step, **norm)
            if step % 10 == 0:
                log.append("eval", step=step, loss=9.0 / step)
        log.close()
        names.append(name)
    return names


def test_a_page_has_a_chart_for_each_metric_and_a_curve_for_each_run_that_has_it(
    runs: list[str], tmp_path: Path
) -> None:
    done = cli.run(*WORDS, *runs[:2], "--html", "p.html", "--json", cwd=tmp_path)
    assert json.loads(done.stdout) == {"files": ["p.html"]}, done.stderr
    text = (tmp_path / "p.html").read_text()
    titles = ["Training loss", "Evaluation loss", "Throughput", "Gradient norm"]
    assert [title for title in titles if title not in text] == []
    charts = re.findall(r"<svg.*?</svg>", text, flags=re.DOTALL)
    assert len(charts) == 8, "each chart is drawn for wide and for narrow screens"
    assert [chart.count("<title>night 20260102_120000-ab12</title>") for chart in charts[::2]] == [2, 1, 1, 0]
    assert "prefers-color-scheme: dark" in text


def test_only_the_metrics_that_are_named_are_drawn(runs: list[str], tmp_path: Path) -> None:
    assert cli.run(*WORDS, "day", "--html", "p.html", "--metrics", "tokens_per_s", cwd=tmp_path).returncode == 0
    text = (tmp_path / "p.html").read_text()
    assert "Throughput" in text and "Training loss" not in text


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["day"], "neither --html nor --png is given"),
        (["--html", "p.html"], "no run is named"),
        (["empty", "--html", "p.html"], "run 20260103_120000-ab12 has no steps"),
        (["day", "--metrics", "los", "--html", "p.html"], "no run has the metric 'los'\n  did you mean 'loss'?"),
        (["day", "--png", "p.gif"], "--png p.gif: the name does not end with .png"),
    ],
)
def test_what_cannot_be_drawn_is_an_error(words: list[str], problem: str, runs: list[str], tmp_path: Path) -> None:
    done = cli.run(*WORDS, *words, cwd=tmp_path)
    assert done.returncode == 2
    assert f"primus-cli: {problem}" in done.stderr
    assert not list(tmp_path.glob("p.*"))


@pytest.mark.skipif(not any(map(shutil.which, browser.NAMES)), reason="no Chromium is installed")
def test_a_picture_has_the_charts_one_below_the_other(runs: list[str], tmp_path: Path) -> None:
    done = cli.run(*WORDS, *runs[:2], "--png", "p.png", cwd=tmp_path, timeout_s=120)
    assert done.returncode == 0, done.stderr
    data = (tmp_path / "p.png").read_bytes()
    width, height = (int.from_bytes(data[at : at + 4], "big") for at in (16, 20))
    assert data.startswith(b"\x89PNG") and width == 2 * 880 and height > 2 * 4 * 250
