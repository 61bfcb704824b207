"""Check this node with the options of Primus' node smoke test; the checks are those of `preflight`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from primus.preflight import session
from primus.preflight.options import Options
from primus.preflight.session import prepare, run

if TYPE_CHECKING:
    from primus.runs.attempt import Attempt

__all__ = ["Options", "prepare", "run", "work"]


def work(attempt: Attempt) -> None:
    """Measure, as one rank of the run that `--perf` starts."""
    from primus.measure import suite

    suite.run(attempt, session.build_worker_config(attempt))
