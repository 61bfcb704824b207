"""Record failures that the hardware of a node causes in the list of unfit nodes, which later jobs avoid."""

from __future__ import annotations

from collections.abc import Mapping

from primus.diagnosis.diagnose import Diagnosis
from primus.diagnosis.finding import Cause
from primus.errors import PrimusError
from primus.launch.supervision.restart_policy import AttemptResult
from primus.messages import Say
from primus.runs.store import Run
from primus.runs.unfit_nodes import NodeRecord, add_record, is_same_node, read_unfit_nodes

HANG = "hang"
"""Signature of a rank without progress whose logs do not tell why."""
NOT_HARDWARE = frozenset(
    (
        *("slurm-credential", "step-not-started", "container-hook-failed", "ssh-unreachable", "node-lost"),
        *("kernel-nfs-not-responding", "gpu-busy", "unfit-node"),
    )
)
"""Causes for which a restart leaves a node out, but which tell nothing of its hardware: a service of the site, another
job, or a node that its scheduler knows to be away; preflight records an unfit node itself."""


def record_node_failure(
    run: Run, result: AttemptResult, diagnosis: Diagnosis, environ: Mapping[str, str], say: Say, *, is_alone: bool
) -> None:
    """Record a failed attempt if its node is to blame.

    Args:
        run: The run.
        result: Result of the attempt, with the blamed host.
        diagnosis: What the logs of the attempt show.
        environ: Variables with the folder of the list.
        say: Prints a line.
        is_alone: Whether the job has a single node: then a hang tells nothing of it, as no other node gets on.
    """
    found = _find_blamed_node(result, diagnosis, is_alone=is_alone)
    if found is None:
        return
    node, signature, cause = found
    record = NodeRecord(
        node=node,
        kind="failure",
        reason=cause.summary if cause else result.reason,
        time=0,
        source="diagnosis",
        run=str(run.directory),
        attempt=result.attempt,
        signature=signature,
        line=_format_evidence(cause) if cause else "",
    )
    try:
        add_record(environ, record)
    except (PrimusError, OSError) as error:  # the job itself does not need the list
        say(f"the failure of {node} is not recorded in the list of unfit nodes: {error}")
        return
    listed = read_unfit_nodes(environ).find(node)
    if listed is None:
        say(f"recorded a failure of {node} ({signature}); after a second one, jobs avoid it")
    else:
        say(
            f"{node} is unfit: {listed.format_reason()}; jobs avoid it until nodes check {node} or "
            f"nodes remove {node} clears it"
        )


def _find_blamed_node(
    result: AttemptResult, diagnosis: Diagnosis, *, is_alone: bool
) -> tuple[str, str, Cause | None] | None:
    """The node, the signature and the cause; None if no hardware is to blame."""
    cause = diagnosis.cause
    # The action of the diagnosis, not of the cause: a node that reports another one is not blamed.
    is_hardware = cause is not None and diagnosis.action == "exclude" and cause.signature not in NOT_HARDWARE
    if result.kind == "failed" and is_hardware and result.action == "exclude" and result.hosts:
        return result.hosts[0], cause.signature, cause  # type: ignore[union-attr]
    if result.kind == "lost node" and is_hardware and diagnosis.first_host:
        lost = [host for host in result.hosts if is_same_node(host, diagnosis.first_host)]
        return (lost[0], cause.signature, cause) if lost else None  # type: ignore[union-attr]
    if result.kind == "hang" and result.hosts and (is_hardware or (cause is None and not is_alone)):
        return result.hosts[0], cause.signature if cause else HANG, cause
    return None


def _format_evidence(cause: Cause) -> str:
    first = next(iter(cause.evidence), None)
    return f"{first.file}:{first.line}: {first.text}" if first else ""
