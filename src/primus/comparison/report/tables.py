"""The report of a comparison as tables: for the terminal, as Markdown and as CSV."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Sequence

from msgspec import Struct

from primus.comparison.fairness.verdict import PairVerdict
from primus.comparison.report.comparison_report import CellPair, CellReport, ComparisonReport
from primus.comparison.speed.cell_statistics import RATIO_LEVEL, SpeedEstimate
from primus.report import table
from primus.report.markdown import format_markdown_table
from primus.report.table import format_number

Rows = list[list[str]]
CSV_COLUMNS = {
    **{name: name for name in ("platform", "framework", "model")}, "class": "settings_class",
    **{name: name for name in ("device", "devices", "precision")},
    **{name: f"statistics.{name}" for name in ("runs", "steps", "warm_up_steps")}, "step_s": "statistics.step_s.value",
    "step_s_low": "statistics.step_s.low", "step_s_high": "statistics.step_s.high", "tokens_per_s_per_device": "speed",
    "tokens_per_cpu_s": "statistics.tokens_per_cpu_s.value", "mean_tokens_per_s": "statistics.mean_tokens_per_s",
    "mfu_causal": "utilization.causal", "mfu_full": "utilization.full", "memory_gb": "memory_gb",
    **{name: name for name in ("joules_per_million_tokens", "cost_per_million_tokens")}, "currency": "price.currency",
    **{name: name for name in ("seconds_to_loss", "final_loss", "problems")},
}  # fmt: skip
"""Field of a cell by column."""
MOST_ANSWERS = 4
"""Pairs that have a sentence; all are in the table."""
MOST_REASONS = 3
"""Reasons that the terminal shows for a pair; the page has all."""


class ComparisonTable(Struct, frozen=True, kw_only=True):
    """A table with its title."""

    title: str
    header: list[str]
    rows: Rows
    right: list[int] = []
    """Columns of numbers."""


def list_report_tables(report: ComparisonReport) -> list[ComparisonTable]:
    """All tables that have rows."""
    tables = [_list_cells(report), _list_efficiency(report), _list_unmeasured(report), _list_pairs(report)]
    tables += [_list_slow_steps(report), _list_seeds(report), _list_published(report), _list_problems(report)]
    return [each for each in tables if each.rows]


def list_answers(report: ComparisonReport) -> list[str]:
    """What the comparison answers, as sentences: of each fair pair which is faster, the largest difference first."""
    shown = [pair for pair in report.pairs if pair.ratio is not None and pair.verdict.status == "fair"]
    ordered = sorted(shown, key=lambda pair: -abs(math.log(pair.ratio.value)) if pair.ratio else 0.0)
    answers = [_format_answer(pair) for pair in ordered[:MOST_ANSWERS]]
    if len(ordered) > MOST_ANSWERS:
        answers.append(f"{len(ordered) - MOST_ANSWERS} more fair pairs are in the table of pairs.")
    if answers or not report.pairs:
        return answers
    first = report.pairs[0]
    return [f"No pair is fair, so that no speed is compared: {first.a} and {first.b}: {_shorten(first)}."]


def _format_answer(pair: CellPair) -> str:
    ratio = pair.ratio
    assert ratio is not None, "the pair has a ratio"
    if not ratio.is_difference:
        return f"{pair.a} and {pair.b} show no difference in speed: {ratio.describe().partition(': no difference')[0]}."
    names, numbers = (pair.a, pair.b), (ratio.value, ratio.low, ratio.high)
    if ratio.value < 1:
        names, numbers = (pair.b, pair.a), (1 / ratio.value, 1 / ratio.high, 1 / ratio.low)
    value, low, high = numbers
    return f"{names[0]} is {value:.3f} times as fast as {names[1]} ({RATIO_LEVEL:.0%}: {low:.3f} to {high:.3f})."


def format_report_text(report: ComparisonReport) -> str:
    """The report for a terminal."""
    parts = list_answers(report)
    parts += [f"{each.title}\n{table.format_table(each.header, each.rows, each.right)}"
             for each in list_report_tables(report)]  # fmt: skip
    return "\n\n".join(parts)


def format_report_markdown(report: ComparisonReport) -> str:
    """The report as Markdown."""
    parts = [f"# {report.name}", *list_answers(report)]
    for each in list_report_tables(report):
        parts += [f"## {each.title}", format_markdown_table(each.header, each.rows, each.right)]
    for pair in report.pairs:
        found = list_checks(pair.verdict)
        parts += [f"## {pair.a} and {pair.b}: {pair.verdict.status}"]
        parts.append(format_markdown_table(found.header, found.rows))
    return "\n\n".join(parts) + "\n"


def format_report_csv(report: ComparisonReport) -> str:
    """A row for each cell, with all digits."""
    written = io.StringIO()
    writer = csv.writer(written, lineterminator="\n")
    writer.writerow(CSV_COLUMNS)
    for cell in report.cells:
        row = {name: _read_field(cell, path) for name, path in CSV_COLUMNS.items()}
        row |= {"problems": "; ".join(cell.problems), "runs": row["runs"] or 0, "steps": row["steps"] or 0}
        writer.writerow(["" if value is None else value for value in row.values()])
    return written.getvalue()


def _read_field(value: object, path: str) -> object:
    for name in path.split("."):
        value = getattr(value, name, None)
    return value


def list_checks(verdict: PairVerdict) -> ComparisonTable:
    """What differs between two cells, and what is proved equal."""
    rows = [[check.judgement, check.rule, check.a, check.b, check.reason] for check in verdict.checks]
    rows.append(["same", f"{verdict.same_settings} other settings", "", "", "equal"])
    return ComparisonTable(title="Fairness", header=["judgement", "fact", verdict.a, verdict.b, "reason"], rows=rows)


def describe_ratio(pair: CellPair) -> str:
    """The ratio of a pair, or why it has none."""
    if pair.ratio is None:
        return f"no ratio: {_shorten(pair)}"
    unfair = f"; NOT FAIR: {_shorten(pair)}" if pair.verdict.status != "fair" else ""
    return f"{pair.ratio.describe()}{unfair}"


def _shorten(pair: CellPair) -> str:
    reasons = pair.refusal.split("; ")
    more = f"; and {len(reasons) - MOST_REASONS} more" if len(reasons) > MOST_REASONS else ""
    return "; ".join(reasons[:MOST_REASONS]) + more


def _list_cells(report: ComparisonReport) -> ComparisonTable:
    rows = []
    for cell in (each for each in report.cells if each.speed or each.statistics):
        found = cell.statistics
        rows.append(
            [
                cell.label,
                str(found.runs) if found else "0",
                str(found.steps) if found else "0",
                str(found.warm_up_steps) if found else "-",
                _format_estimate(found.step_s if found else None, 1e3),
                _format_speed(cell),
                _format_estimate(found.tokens_per_cpu_s if found else None),
                f"{found.p95_by_median:.2f}" if found else "-",
                f"{found.slow_share:.1%}" if found else "-",
                format_number(cell.memory_gb),
                f"{cell.final_loss:.4f}" if cell.final_loss is not None else "-",
            ]
        )
    header = ["cell", "runs", "steps", "warm-up", "step ms", "tokens/s/device", "tokens/CPU s", "p95/median",
              "in slow steps", "memory GB", "final loss"]  # fmt: skip
    title = "Cells (medians with 95 % intervals, final loss of the first run)"
    return _select_columns(title, header, rows)


def _list_efficiency(report: ComparisonReport) -> ComparisonTable:
    rows = [
        [
            cell.label,
            _format_share(cell.utilization.causal),
            _format_share(cell.utilization.full),
            format_number(cell.utilization.peak_tflops),
            format_number(cell.joules_per_million_tokens),
            f"{format_number(cell.cost_per_million_tokens)} {cell.price.currency}" if cell.price else "-",
            format_number(cell.seconds_to_loss),
        ]
        for cell in report.cells
    ]
    target = f"s to loss {report.target_loss:g}" if report.target_loss is not None else "s to loss"
    header = ["cell", "MFU causal", "MFU full", "peak TFLOP/s", "J per 10^6 tokens", "cost per 10^6 tokens", target]
    return _select_columns("Efficiency", header, rows)


def _select_columns(title: str, header: Sequence[str], rows: Rows) -> ComparisonTable:
    """The columns that have a number; no row if none has."""
    kept = [0, *(column for column in range(1, len(header)) if any(row[column] != "-" for row in rows))]
    return ComparisonTable(
        title=title,
        header=[header[column] for column in kept],
        rows=[[row[column] for column in kept] for row in rows] if len(kept) > 1 else [],
        right=[*range(1, len(kept))],
    )


def _list_unmeasured(report: ComparisonReport) -> ComparisonTable:
    """Why the report has no column of what readers look for."""
    devices = ", ".join(sorted({f"{cell.device} in {cell.precision}" for cell in report.cells if cell.device}))
    rows = []
    if all(cell.utilization.peak_tflops is None for cell in report.cells):
        rows.append(["MFU", f"the dense peak of {devices or 'the devices'} is not known"])
    if all(cell.joules_per_million_tokens is None for cell in report.cells):
        rows.append(
            ["energy", "no result has the power of the GPUs of its run alone, or the RAPL counters of the CPUs"]
        )
    return ComparisonTable(title="Not measured", header=["figure", "reason"], rows=rows)


def _list_pairs(report: ComparisonReport) -> ComparisonTable:
    rows = [
        [pair.a, pair.b, pair.verdict.status, *map(format_number, pair.speeds or (None, None)), describe_ratio(pair)]
        for pair in report.pairs
    ]
    header = ["A", "B", "fairness", "A tokens/s", "B tokens/s", "A by B"]
    title = "Pairs: how many times as fast A is as B (typical steps after the longer warm-up of both)"
    return ComparisonTable(title=title, header=header, rows=rows, right=[3, 4])


def _list_slow_steps(report: ComparisonReport) -> ComparisonTable:
    rows = [
        [cell.label, slow.run, str(slow.step), format_number(slow.time_s * 1e3), slow.cause]
        for cell in report.cells
        for slow in (cell.statistics.slow_steps if cell.statistics else [])[:5]
    ]
    header = ["cell", "run", "step", "ms", "cause"]
    return ComparisonTable(title="Slow steps (the slowest five of each cell)", header=header, rows=rows, right=[2, 3])


def _list_seeds(report: ComparisonReport) -> ComparisonTable:
    rows = [
        [
            cell.label,
            ", ".join(map(str, cell.seeds)),
            str(len(cell.loss_spread.by_step)),
            f"{cell.loss_spread.mean:.3g}",
        ]
        for cell in report.cells
        if cell.loss_spread
    ]
    header = ["cell", "seeds", "steps", "mean difference of two seeds"]
    return ComparisonTable(title="Losses with other seeds", header=header, rows=rows, right=[2, 3])


def _list_published(report: ComparisonReport) -> ComparisonTable:
    rows = [
        [each.label, each.model, format_number(each.tokens_per_s_per_device), format_number(each.minutes_to_train),
         each.settings_class, each.version, "; ".join(filter(None, (str(each.layout or ""), each.note))), each.source]
        for each in report.published
    ]  # fmt: skip
    header = ["published", "model", "tokens/s/device", "minutes to train", "class", "version", "note", "source"]
    title = "Published results (other settings: no ratios)"
    return ComparisonTable(title=title, header=header, rows=rows, right=[2, 3])


def _list_problems(report: ComparisonReport) -> ComparisonTable:
    rows = [[cell.label, problem] for cell in report.cells for problem in cell.problems]
    rows += [["skipped", text] for text in report.skipped]
    return ComparisonTable(title="Problems", header=["cell", "problem"], rows=rows)


def _format_estimate(found: SpeedEstimate | None, factor: float = 1.0) -> str:
    if found is None:
        return "-"
    low, high = (format_number(bound * factor) for bound in (found.low, found.high))
    return f"{format_number(found.value * factor)} [{low}, {high}]"


def _format_speed(cell: CellReport) -> str:
    if cell.utilization.problem:
        return "refused"
    if cell.statistics and cell.statistics.tokens_per_s_per_device:
        return _format_estimate(cell.statistics.tokens_per_s_per_device)
    average = cell.average_tokens_per_s_per_device
    return f"{format_number(average)} (average)" if average else "-"


def _format_share(share: float | None) -> str:
    return "-" if share is None else f"{share:.1%}"
