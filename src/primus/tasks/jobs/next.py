"""Say what follows a step of a batch job (batch scripts ask this)."""

from __future__ import annotations

import sys
from pathlib import Path

from msgspec import Struct

from primus import registry
from primus.config.flags import Positional
from primus.launch.supervision.restart_policy import RestartPolicy
from primus.runs.store import Run
from primus.task import TaskContext


class Options(Struct, frozen=True, kw_only=True):
    """Options of `jobs next`."""

    run: Positional
    """Run folder."""
    exit_code: int
    """Exit code of the step."""
    num_nodes: int = 1
    """Nodes that a step takes."""
    warned: bool = False
    """The end of the job was announced."""
    excluded: str = ""
    """Nodes that are left out already, with commas between them."""
    can_requeue: bool = False
    """The job may be queued again."""
    max_restarts: int = 0
    """Restarts after failures."""
    restart_delay: float = 30.0
    """Seconds before the first of them."""


def run(options: Options, context: TaskContext) -> None:
    """Print one line: finish, restart SECONDS [NODE,...], requeue, or stop CODE; and why, on standard error."""
    line, reason = registry.load_plug_in("runtimes", "slurm").after_step(
        Run(Path(options.run)),
        context.environ,
        exit_code=options.exit_code,
        num_nodes=options.num_nodes,
        is_warned=options.warned,
        excluded=tuple(filter(None, options.excluded.split(","))),
        can_requeue=options.can_requeue,
        policy=RestartPolicy(max_restarts=options.max_restarts, backoff_s=options.restart_delay),
    )
    print(f"primus: {line}: {reason}", file=sys.stderr, flush=True)
    print(line, flush=True)
