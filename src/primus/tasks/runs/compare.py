"""Explain the difference between two runs: which setting, machine or version made one faster, or its loss another."""

from __future__ import annotations

from typing import TYPE_CHECKING

from primus.report import table
from primus.task import TaskContext
from primus.tasks.runs._run_pair import RunPairOptions, find_run_pair

if TYPE_CHECKING:
    from primus.run_report.comparison import RunComparison


Options = RunPairOptions


def run(options: RunPairOptions, context: TaskContext) -> None:
    """Print the comparison.

    Raises:
        UsageError: A run does not exist.
    """
    # numpy: not for the commands that only list this task.
    from primus.run_report.comparison import compare_runs

    a, b = find_run_pair(options)
    found = compare_runs(a, b)
    context.result(
        {"a": str(a.directory), "b": str(b.directory), "comparison": found}, _format_comparison(found, a.id, b.id)
    )


def _format_comparison(found: RunComparison, a: str, b: str) -> str:
    from primus.traces.format import format_difference

    parts = [f"A: {a}\nB: {b}", f"speed: {found.speed_explanation}", f"loss: {found.loss_explanation}"]
    if found.speed is not None:
        rows = [["tokens/s", table.format_number(found.speed.a), table.format_number(found.speed.b)]]
        rows += [[str(name), *(f"{seconds:.4g} s" for seconds in times)] for name, *times in found.speed.parts]
        parts.append(table.format_table(["of a step", "A", "B"], rows, right=(1, 2)))
    if found.candidates:
        rows = [[each.kind, each.what, str(each.a), str(each.b), ", ".join(each.effects)] for each in found.candidates]
        parts.append(table.format_table(["", "difference", "A", "B", "can change"], rows))
    if found.trace is not None:
        parts.append(format_difference(found.trace, a, b))
    return "\n\n".join(parts)
