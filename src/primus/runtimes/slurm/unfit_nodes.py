"""Unfit nodes in the terms of Slurm: --exclude, the nodes of the cluster, and those of an allocation."""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import structs

from primus.launch.nodes.avoided_nodes import AvoidedNodes, choose_among, plan_avoided_nodes
from primus.plan import LaunchPlan, PlanContext, Variable
from primus.runs.files import UNFIT_NODES_VARIABLE
from primus.runs.unfit_nodes import UnfitNodes, is_same_node
from primus.runtimes.slurm import queries
from primus.runtimes.slurm.options import Options, find_least_nodes, find_option_value

UNUSABLE = ("down", "drained", "draining", "fail", "failing", "maint", "unknown", "future")
"""States of nodes that no job gets (sinfo(1), NODE STATE CODES)."""


def add_avoided_nodes(planned: LaunchPlan, options: Options, listed: UnfitNodes, context: PlanContext) -> LaunchPlan:
    """The plan of a step or job, without unfit nodes."""
    found = plan_excluded_nodes(options, listed, context.environ)
    # Of a batch job not in the script: the option on the command line overrides the one there, and is chosen again for
    # the nodes of the cluster at the submission.
    num_last = 1 if options.command == "sbatch" else len(context.there)
    argv = (*planned.argv[:-num_last], *format_exclude(options, found.avoided), *planned.argv[-num_last:])
    folder = options.unfit_nodes
    env = {UNFIT_NODES_VARIABLE: Variable(folder, "--unfit-nodes")} if folder is not None else {}
    notes = (*planned.notes, *found.notes)
    return structs.replace(planned, argv=argv, env=planned.env | env, avoided=found.avoided, notes=notes)


def plan_excluded_nodes(options: Options, listed: UnfitNodes, environ: Mapping[str, str]) -> AvoidedNodes:
    """What the job does about unfit nodes, without a query: inside an allocation only about those of its nodes."""
    typed = options.slurm_options
    excluded = find_option_value(typed, "exclude") or ""
    if "/" in excluded:
        note = f"warning: the list of unfit nodes is not applied: --exclude={excluded} is a file"
        return AvoidedNodes(notes=(note,) if listed.unfit else ())
    named = queries.expand_node_list(find_option_value(typed, "nodelist") or "")
    found = plan_avoided_nodes(listed, named=named, excluded=queries.expand_node_list(excluded))
    if options.command == "srun" and "SLURM_JOB_ID" in environ:
        nodes = queries.expand_node_list(environ.get("SLURM_JOB_NODELIST", ""))
        is_counted = find_option_value(typed, "nodes") is not None
        return found.merge(choose_among(found.avoided, nodes, find_least_nodes(typed) if is_counted else len(nodes)))
    return found


def choose_cluster_nodes(found: AvoidedNodes, options: Options, environ: Mapping[str, str]) -> AvoidedNodes:
    """`found` for the nodes that Slurm has: it rejects unknown names, and enough nodes must be left for the job."""
    partition = find_option_value(options.slurm_options, "partition")
    where = [f"--partition={partition}"] if partition else []
    answer = queries.run_query(["sinfo", "--noheader", "--Node", "--format=%N|%T", *where], environ)
    states = dict(line.strip().partition("|")[::2] for line in answer.out.splitlines()) if answer.code == 0 else {}
    if not states:  # sbatch will say why
        return found
    excluded = queries.expand_node_list(find_option_value(options.slurm_options, "exclude") or "")
    usable = [name for name, state in states.items() if name not in excluded and _is_usable(state)]
    # A node that is down is excluded as well: it may be back before the job starts.
    known = {name: why for each, why in found.avoided.items() for name in states if is_same_node(each, name)}
    down = {name: why for name, why in known.items() if name not in usable}
    chosen = choose_among(known, usable, find_least_nodes(options.slurm_options) + options.spare_nodes)
    return found.merge(structs.replace(chosen, avoided=chosen.avoided | down))


def format_exclude(options: Options, avoided: Mapping[str, str]) -> tuple[str, ...]:
    """The option for Slurm: the nodes of the user's --exclude, and the avoided ones."""
    own = find_option_value(options.slurm_options, "exclude")
    return (f"--exclude={','.join([*([own] if own else []), *avoided])}",) if avoided else ()


def _is_usable(state: str) -> bool:
    return not state.endswith("*") and state.rstrip("*$~#!%@^-+") not in UNUSABLE
