"""List the runs of a workspace."""

from __future__ import annotations

from pathlib import Path

from msgspec import Struct

from primus.report import table
from primus.runs import store, summary
from primus.task import TaskContext


class Options(Struct, frozen=True, kw_only=True):
    """Options of `runs list`."""

    workspace: str = "./output"
    """Folder that holds all run folders."""
    name: str | None = None
    """Only runs of this experiment."""


def run(options: Options, context: TaskContext) -> None:
    """Print one line a run, oldest first."""
    workspace = Path(options.workspace)
    runs = store.list_runs(workspace / options.name) if options.name else store.list_workspace_runs(workspace)
    summaries = [summary.summarize_run(run) for run in runs]
    header = ["run", "experiment", "state", "steps", "loss", "eval loss", "tokens/s", "time", "size"]
    rows = [
        [
            item.id,
            item.name,
            item.state,
            str(item.steps),
            table.format_number(item.last_loss),
            table.format_number(item.eval_loss),
            table.format_number(item.tokens_per_s),
            table.format_duration(item.duration_s),
            table.format_size(item.size_bytes),
        ]
        for item in summaries
    ]
    # Size, time and the loss of evaluations are what a narrow terminal can do without; `runs show` has them.
    text = (
        table.format_table(header, rows, right=range(3, 9), spare=[8, 7, 5])
        if rows
        else f"no runs in {options.workspace}"
    )
    private = store.list_private_runs(workspace, options.name)
    if private:
        text += f"\nno permission to read {len(private)} more, such as {private[0]}"
    context.result(summaries, text)
