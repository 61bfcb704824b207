"""The nodes of a Slurm cluster by state, and the options of a job that checks one of them."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence

from primus.errors import PrimusError, UsageError
from primus.runtime import ClusterNode, NodeJob
from primus.runtimes.slurm import queries
from primus.runtimes.slurm.options import find_option_value, parse

IDLE = ("idle", "planned")
"""States in which a job of one node can start at once. A planned node waits for a larger job; the scheduler starts a
short job there only if it does not delay that one (sinfo(1), NODE STATE CODES)."""
BUSY = ("allocated", "mixed", "completing", "blocked", "reserved", "perfctrs")
DRAINED = ("drained", "draining", "fail", "failing", "maint")
POWERED_DOWN = {"~": "powered down", "%": "powering down", "#": "powering up", "!": "will be powered down"}
FLAGS = "*~#!%$@^-+"
"""Characters behind a state (sinfo(1), NODE STATE CODES)."""


def list_nodes(words: Sequence[str], environ: Mapping[str, str]) -> list[ClusterNode]:
    """The nodes of the partition in `words`, or of the cluster.

    Raises:
        PrimusError: Slurm does not respond.
    """
    typed = parse(words).slurm_options
    where = [f"--{name}={value}" for name in ("partition", "clusters") if (value := find_option_value(typed, name))]
    # The reason comes last, since it may contain any character.
    argv = ["sinfo", "--noheader", "--Node", "--format=%N|%T|%G|%E", *where]
    answer = queries.run_query(argv, environ)
    lines = [line.strip() for line in answer.out.splitlines() if line.count("|") >= 3]
    if answer.code != 0 or not lines:
        raise PrimusError(
            f"sinfo lists no nodes: {answer.err or answer.out.strip() or answer.code}", "check the partition"
        )
    # A node is listed once for each of its partitions.
    return list({node.name: node for node in map(_parse_node, lines)}.values())


def _parse_node(line: str) -> ClusterNode:
    name, shown, resources, reason = line.split("|", 3)
    reason = "" if reason in ("none", "(null)") else reason
    state = shown.rstrip(FLAGS)
    flags = shown[len(state) :]
    gpus = sum(int(number) for number in re.findall(r"gpu(?::[^:,(]+)?:(\d+)", resources))
    power = next((text for sign, text in POWERED_DOWN.items() if sign in flags), "")
    if state in DRAINED:
        return ClusterNode(name=name, state="drained", reason=reason or shown, gpus=gpus)
    if "*" in flags or power or state not in (*IDLE, *BUSY):
        silent = "does not respond" if "*" in flags else ""
        return ClusterNode(name=name, state="down", reason=reason or silent or power or shown, gpus=gpus)
    is_idle = state in IDLE and not set(flags) & set("$@^")
    return ClusterNode(name=name, state="idle" if is_idle else "busy", reason="" if is_idle else shown, gpus=gpus)


def select_node(words: Sequence[str], job: NodeJob) -> tuple[str, ...]:
    """`words` for a step on one node.

    Raises:
        UsageError: They submit a batch job.
    """
    options = parse(words)
    if options.command != "srun":
        raise UsageError("nodes check waits for its jobs: use slurm srun, not slurm sbatch")
    minutes = math.ceil(job.limit_s / 60)
    ours = {"job-name": f"={job.name}", "time": f"={minutes}", "exclusive": "", "nice": ""}
    if job.start_s is not None:  # srun gives up when a node is not free any more
        ours["immediate"] = f"={math.ceil(job.start_s)}"
    given = {each.name for each in options.slurm_options}
    return (
        *words,
        "--nodes=1",
        f"--nodelist={job.node.name}",
        *(f"--{name}{value}" for name, value in ours.items() if name not in given),
    )
