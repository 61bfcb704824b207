"""Charts of several runs over their steps: a page, or a picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from msgspec import Struct

from primus.errors import UsageError, did_you_mean
from primus.report import page, table
from primus.report.charts import draw_line_chart, select_wide
from primus.report.page import Html
from primus.report.picture_files import write_pictures
from primus.runs import events, summary
from primus.runs.events import Event
from primus.runs.files import write_text
from primus.runs.store import Run
from primus.runs.summary import RunSummary

DEFAULT_METRICS = ("loss", "tokens_per_s", "grad_norm")
TITLES = {"loss": "Training loss", "tokens_per_s": "Throughput", "grad_norm": "Gradient norm", "mfu": "MFU"}


class PlottedRun(Struct, frozen=True, kw_only=True):
    """The numbers of a run."""

    label: str
    summary: RunSummary
    steps: list[Event]
    evaluations: list[tuple[float, float | None]]
    """Step and loss."""

    def read_column(self, metric: str) -> list[tuple[float, float | None]]:
        """The value of each step; None where it is not a number."""
        return [(event["step"], _read_number(event.get(metric))) for event in self.steps]


def read_plotted_run(run: Run) -> PlottedRun:
    """Read a run in any state.

    Raises:
        UsageError: It has no steps.
    """
    steps = events.read_steps(run.events)
    if not steps:
        raise UsageError(f"run {run.id} has no steps", "name a run that has trained")
    found = summary.summarize_run(run)
    evaluations = [
        (event["step"], _read_number(event.get("loss")))
        for event in events.read_events(run.events)
        if event["kind"] == "eval" and isinstance(event.get("step"), int)
    ]
    return PlottedRun(label=f"{found.name} {found.id}", summary=found, steps=steps, evaluations=evaluations)


def write_page(runs: Sequence[PlottedRun], metrics: Sequence[str], file: Path) -> Path:
    """Write a page with a table of the runs and a chart for each metric."""
    rows = [
        [
            each.label,
            each.summary.state,
            f"{each.summary.steps:,}",
            *map(table.format_number, (each.summary.last_loss, each.summary.eval_loss, each.summary.tokens_per_s)),
            table.format_duration(each.summary.duration_s),
        ]
        for each in runs
    ]
    header = ["run", "state", "steps", "loss", "evaluation loss", "tokens/s", "time"]
    sections = [("Runs", page.make_table(header, rows, range(2, 7)))]
    sections.append(("Curves", page.join_fragments(*draw_charts(runs, metrics))))
    title = f"Run {runs[0].summary.id}" if len(runs) == 1 else f"{len(runs)} runs"
    write_text(file, page.format_page(title, sections))
    return file


def write_picture(runs: Sequence[PlottedRun], metrics: Sequence[str], file: Path) -> Path:
    """Write the charts, one below the other.

    Raises:
        UnfitError: No browser is installed.
        UsageError: The name of the file does not end with .png.
    """
    if file.suffix != ".png":
        raise UsageError(f"--png {file}: the name does not end with .png")
    charts = [select_wide(chart) for chart in draw_charts(runs, metrics)]
    return write_pictures({file.stem: page.join_fragments(*charts)}, file.parent)[0]


def draw_charts(runs: Sequence[PlottedRun], metrics: Sequence[str]) -> list[Html]:
    """A chart for each metric, with a curve for each run that has it; evaluations follow the loss.

    Raises:
        UsageError: No run has a metric.
    """
    charts = []
    for metric in metrics or DEFAULT_METRICS:
        curves = [(each.label, each.read_column(metric)) for each in runs]
        curves = [(label, points) for label, points in curves if any(value is not None for _, value in points)]
        if not curves and metrics:
            known = sorted({name for each in runs for name, value in each.steps[-1].items() if _is_number(value)})
            raise UsageError(f"no run has the metric '{metric}'", did_you_mean(metric, known))
        name = table.format_value_name(metric)
        if curves:
            charts.append(draw_line_chart(TITLES.get(metric, name.capitalize()), curves, name, "step"))
        evaluated = [(each.label, each.evaluations) for each in runs if len(each.evaluations) > 1]
        if metric == "loss" and evaluated:
            charts.append(draw_line_chart("Evaluation loss", evaluated, "loss", "step"))
    return charts


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _read_number(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None
