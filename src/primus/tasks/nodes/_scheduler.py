"""Take nodes out of service for everybody, by the command of their scheduler: only where the user asks for it."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from primus import process
from primus.errors import PrimusError
from primus.task import TaskContext

LIMIT_S = 60.0


def drain_nodes(nodes: Sequence[str], reason: str, context: TaskContext) -> None:
    """Drain nodes in Slurm: their jobs go on, and no new one starts (scontrol(1), NODES - SPECIFICATIONS).

    Raises:
        PrimusError: scontrol fails; it needs an operator of Slurm.
    """
    names = ",".join(nodes)
    argv = ["scontrol", "update", f"NodeName={names}", "State=DRAIN", f"Reason=primus: {reason}"]
    _run(argv, context, "ask an operator of Slurm; the nodes are in the list of unfit nodes")


def cordon_nodes(nodes: Sequence[str], context: TaskContext) -> None:
    """Cordon nodes in Kubernetes: their pods go on, and no new one starts.

    Raises:
        PrimusError: kubectl fails; it needs the right to change nodes.
    """
    _run(
        ["kubectl", "cordon", *nodes], context, "ask for the right to patch nodes; they are in the list of unfit nodes"
    )


def _run(argv: Sequence[str], context: TaskContext, hint: str) -> None:
    context.say(f"runs: {shlex.join(argv)}")
    answer = process.run_command(argv, context.environ, LIMIT_S)
    if answer.problem:
        raise PrimusError(f"{argv[0]}: {answer.problem}", hint)
