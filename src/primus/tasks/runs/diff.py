"""Compare two runs: configuration, environment, results."""

from __future__ import annotations

from typing import Any

from primus.report import table
from primus.runs import summary
from primus.runs.differences import (
    RunDifference,
    compare_environments,
    compare_losses,
    compare_mappings,
    describe_losses,
    read_run_packages,
)
from primus.runs.evaluations import read_evaluations, select_newest
from primus.runs.store import Run
from primus.task import TaskContext
from primus.tasks.runs._run_pair import RunPairOptions, find_run_pair

Options = RunPairOptions


def run(options: RunPairOptions, context: TaskContext) -> None:
    """Print the differences.

    Raises:
        UsageError: A run does not exist.
    """
    a, b = find_run_pair(options)
    sections = {
        "configuration": compare_mappings(summary.flatten_run_settings(a), summary.flatten_run_settings(b)),
        "environment": compare_environments(a, b),
        "packages": compare_mappings(read_run_packages(a), read_run_packages(b)),
        "evaluations": compare_mappings(*(select_newest(read_evaluations(each)) for each in (a, b))),
        "results": _compare_results(a, b),
    }
    losses = compare_losses(a, b)
    sections["results"].append(RunDifference("losses", describe_losses(losses), ""))
    value = {"a": str(a.directory), "b": str(b.directory), **sections, "losses": losses}
    context.result(value, "\n\n".join(_format_changes(title, changes, a, b) for title, changes in sections.items()))


def _compare_results(a: Run, b: Run) -> list[RunDifference]:
    first, second = summary.summarize_run(a), summary.summarize_run(b)
    names = ("state", "steps", "last_loss", "eval_loss", "tokens_per_s", "duration_s")
    return [RunDifference(name, getattr(first, name), getattr(second, name)) for name in names]


def _format_changes(title: str, changes: list[RunDifference], a: Run, b: Run) -> str:
    if not changes:
        return f"{title}: no difference"
    rows = [[change.what, _format_difference_value(change.a), _format_difference_value(change.b)] for change in changes]
    return f"{title}:\n" + table.format_table(["", a.id, b.id], rows, indent=2)


def _format_difference_value(value: Any) -> str:
    return table.format_number(value) if isinstance(value, float) else str(value)
