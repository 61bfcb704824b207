"""Show what a run of `train rl` has generated in a step: prompts, completions and their rewards."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from msgspec import Meta, Struct

from primus.config.flags import PositionalRun
from primus.errors import UsageError
from primus.report import table
from primus.runs import store
from primus.runs.rollouts import Rollout, list_rollout_steps, read_rollouts
from primus.task import TaskContext

SHOWN_CHARACTERS = 60


class Options(Struct, frozen=True, kw_only=True):
    """Options of `runs rollouts`."""

    run: PositionalRun
    """Run folder, run id or its beginning, or name of an experiment (its newest run)."""
    step: Annotated[int, Meta(ge=1)] | None = None
    """Step, counted from 1 (default: the newest that has rollouts)."""
    full: bool = False
    """Print whole texts."""
    workspace: str = "./output"
    """Folder that holds all run folders."""


def run(options: Options, context: TaskContext) -> None:
    """Print the rollouts.

    Raises:
        UsageError: The run does not exist, or has no rollouts of the step.
    """
    found = store.find_run(options.run, Path(options.workspace))
    steps = list_rollout_steps(found)
    step = options.step or (steps[-1] if steps else 1)
    if step not in steps:
        recorded = f"steps with rollouts: {steps[0]} to {steps[-1]}" if steps else "only train rl records them"
        raise UsageError(f"{found.directory}: no rollouts of step {step}", recorded)
    rollouts = read_rollouts(found, step)
    context.result({"run": str(found.directory), "step": step, "rollouts": rollouts}, _format(rollouts, options.full))


def _format(rollouts: list[Rollout], is_full: bool) -> str:
    names = list(rollouts[0].rewards)
    rows = [
        [
            *(str(each.number), str(each.row), _format_text(each.prompt, is_full)),
            _format_text(each.completion, is_full),
            *(table.format_number(each.rewards[name]) for name in names),
            *(table.format_number(each.reward), table.format_number(each.advantage)),
            *(str(each.length), each.stop_reason),
        ]
        for each in rollouts
    ]
    header = ["number", "row", "prompt", "completion", *names, "reward", "advantage", "tokens", "stop"]
    return table.format_table(header, rows, right=[0, 1, *range(4, 7 + len(names))])


def _format_text(text: str, is_full: bool) -> str:
    shown = text if is_full or len(text) <= SHOWN_CHARACTERS else text[:SHOWN_CHARACTERS] + "..."
    return ascii(shown)[1:-1] if shown.isascii() else shown.replace("\n", "\\n")
