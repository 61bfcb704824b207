"""Training runs that `tune` starts one after the other, and waits for."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from msgspec import Struct

from primus.launch.signals import raise_on_signals
from primus.process import CommandResult, run_command
from primus.runs import store
from primus.runs.store import Run
from primus.task import TaskContext

QUIET = {"eval_interval": "0", "save_interval": "0", "disable_last_saving": "true", "auto_continue_train": "false"}
"""Settings of every trial: nothing but steps."""


class TrialTraining(Struct, frozen=True, kw_only=True):
    """A training that a trial starts."""

    config: str
    """The experiment file."""
    settings: Mapping[str, str] = {}
    """Overrides of this training, after those of the task."""
    workspace: Path
    """Folder of the run."""
    limit_s: float
    options: Sequence[str] = ()
    """Further options of `direct`."""


def run_training(
    training: TrialTraining, context: TaskContext, environ: Mapping[str, str] | None = None
) -> tuple[CommandResult, Run | None]:
    """Train an experiment, and wait; gives how the command ended, and the run folder if there is one.

    Args:
        training: What is trained.
        context: Of the task, with the overrides and processes of all trials.
        environ: Environment; None for that of the task.
    """
    workspace = training.workspace
    before = {run.id for run in store.list_workspace_runs(workspace)}
    nproc = context.layout.nproc if context.layout else 1
    # SIGTERM, as of timeout and schedulers, would end this process and leave the training: it leads its own session.
    with raise_on_signals():
        answer = run_command(
            [
                *(
                    sys.executable,
                    "-m",
                    "primus",
                    "direct",
                    "--nproc",
                    str(nproc),
                    *training.options,
                    "--",
                    "train",
                    "pretrain",
                ),
                "--config",
                training.config,
                *context.overrides,
                *(f"{key}={value}" for key, value in {**QUIET, **training.settings}.items()),
                "--workspace",
                str(workspace),
            ],
            context.environ if environ is None else environ,
            limit_s=training.limit_s,
            ends_with_caller=True,
        )
    runs = [run for run in store.list_workspace_runs(workspace) if run.id not in before]
    return answer, runs[-1] if runs else None
