"""The leaf switches of a Slurm cluster, by which `--placement` becomes a number of switches."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from primus.errors import PrimusError, UsageError
from primus.machine.host_list import expand_hosts
from primus.messages import Say
from primus.runtimes.slurm import queries
from primus.runtimes.slurm.placement import list_placement_options

QUERY_LIMIT_S = 10.0


def fit_to_cluster(
    argv: Sequence[str], placement: str | None, num_nodes: int, environ: Mapping[str, str], say: Say
) -> tuple[str, ...]:
    """`argv` with the number of switches that the nodes need on this cluster.

    Raises:
        UsageError: No leaf of the cluster is large enough, or the cluster has none; a step inside of a job cannot be
            placed.
    """
    if placement not in ("near", "leaf"):
        return tuple(argv)
    if argv[0] == "srun" and "SLURM_JOB_ID" in environ:
        raise UsageError("slurm: --placement: the nodes of this job are chosen already", "give it where the job begins")
    sizes = sorted(_list_leaf_sizes(environ), reverse=True)
    option = next(word for word in list_placement_options(placement, num_nodes))
    if not sizes:
        problem = "slurm: this cluster has no switches that Slurm knows (scontrol show topology)"
        if placement == "leaf":
            raise UsageError(problem, "remove --placement leaf")
        say(f"{problem}: --placement near changes nothing")
        return tuple(word for word in argv if word != option)
    if placement == "leaf" and num_nodes > sizes[0]:
        raise UsageError(
            f"slurm: --placement leaf: the largest leaf has {sizes[0]} nodes, {num_nodes} are asked for",
            "use --placement near, or fewer nodes",
        )
    if num_nodes > sum(sizes):
        return tuple(argv)  # Slurm itself says that there are not so many
    fewest = next(number for number in range(1, len(sizes) + 1) if sum(sizes[:number]) >= num_nodes)
    return tuple(word if word != option else option.replace("=1@", f"={fewest}@") for word in argv)


def _list_leaf_sizes(environ: Mapping[str, str]) -> list[int]:
    """Number of nodes below each leaf switch.

    Raises:
        PrimusError: Slurm does not respond.
    """
    answer = queries.run_query(["scontrol", "--oneliner", "show", "topology"], environ, QUERY_LIMIT_S)
    if answer.code is None:
        raise PrimusError(f"scontrol does not respond: {answer.err}")
    leaves = re.findall(r"SwitchName=\S+ Level=0 .*?Nodes=(\S+)", answer.out)
    return [len(expand_hosts(nodes)) for nodes in leaves]
