"""Record in a run folder why a node of its job could not even plan it, such as a hook with an invalid declaration."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from primus.errors import PrimusError
from primus.launch.run_remote import RANKS, node_rank
from primus.machine.cluster import find_node_name
from primus.runs.store import Run, RunOutcome


def record_planning_failure(error: PrimusError, words: Sequence[str], environ: Mapping[str, str]) -> None:
    """On a node of a job, record `error` as the outcome of the run that `words` name by ``--run``.

    The machine that waits for the job would otherwise know only the exit code of the launcher. A command that a user
    types records nothing: its run may be queued, and start later.
    """
    if "--run" not in words[:-1] or not any(name in environ for name in RANKS):
        return
    rank, run = node_rank(environ), Run(Path(words[words.index("--run") + 1]))
    with contextlib.suppress(PrimusError, OSError):
        # Another node may execute the run already, and keeps its record.
        if run.is_active() or run.read_metadata().outcome.state in ("running", "done"):
            return
        reason = f"node {rank} ({find_node_name()}): {error.problem}" if rank else error.problem
        outcome = RunOutcome(state="failed", exit_code=error.exit_code, reason=reason)
        run.update_metadata(ended=time.time(), outcome=outcome)
