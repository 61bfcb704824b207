"""The order of node ranks, which node 0 chooses at the rendezvous from where the nodes stand on the network."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from msgspec import structs

from primus import registry
from primus.errors import PrimusError
from primus.launch.nodes.rendezvous import RendezvousPeer
from primus.launch.prepare import Launch
from primus.machine.cluster import NODE_NAME_VARIABLE, find_node_name
from primus.machine.placement.node_place import LEAST_ORDERED, find_fabric, read_place_variables
from primus.machine.placement.order_summary import summarize_order
from primus.machine.placement.rank_groups import RankGroups, place_groups_on_nodes
from primus.machine.placement.rank_order import Place, build_switch_tree, choose_order
from primus.messages import Say
from primus.runs.files import write_json
from primus.runs.node_record import NODES_FILE, NodesRecord, RunNode, read_nodes_record
from primus.runs.store import Run
from primus.runtime import PLACE_RUNTIMES

MOST_NAMED = 3
"""Nodes that a line names."""


def assign_node_ranks(launch: Launch, run: Run, peers: Mapping[int, RendezvousPeer], say: Say) -> dict[int, int]:
    """The new rank of each other node by the rank that it joined with; records the nodes in the run folder.

    Raises:
        UsageError: The topology file is wrong.
    """
    policy, layout, job = launch.plan.rank_order, launch.plan.layout, launch.job
    if policy is None or layout is None:
        return {}
    own = RunNode(host=find_node_name(), scheduler_rank=0, place=find_own_place(launch, say))
    nodes = [own] + [
        RunNode(host=peer.host, scheduler_rank=rank, place=peer.place) for rank, peer in sorted(peers.items())
    ]
    record = NodesRecord(nodes=tuple(nodes))
    if policy.by_network:
        nodes = locate_nodes(nodes, policy.topology_file)
        if not any(node.place for node in nodes) and len(nodes) >= LEAST_ORDERED:
            nodes = measure_places(nodes, Path(job.workspace), say)
        earlier = job.resume or job.replay_of
        record = order_nodes(
            nodes,
            job.list_rank_groups(layout.world_size),
            layout.nproc,
            read_nodes_record(Run(Path(earlier))) if earlier else None,
            must_know=policy.topology_file is not None,
        )
    if record.summary:
        say(record.summary)
    write_json(run.directory / NODES_FILE, record)
    return {node.scheduler_rank: rank for rank, node in enumerate(record.nodes) if node.scheduler_rank}


def find_own_place(launch: Launch, say: Say | None = None) -> Place:
    """The switches above this node: those of its variables, else those that its platform names, and its NVLink domain.

    Args:
        say: Reports a platform that refuses; None on all nodes but one.
    """
    context, policy, layout = launch.context, launch.plan.rank_order, launch.plan.layout
    if policy is None or not policy.by_network or layout is None or layout.nnodes < LEAST_ORDERED:
        return ()
    place = read_place_variables(context.environ)
    is_pod = "KUBERNETES_SERVICE_HOST" in context.environ and NODE_NAME_VARIABLE in context.environ
    if not place and is_pod and policy.topology_file is None:
        try:
            place = registry.load_plug_in(PLACE_RUNTIMES, "kubernetes").find_own_place(context.environ)
        except PrimusError as error:
            if say:
                say(f"labels of the nodes do not order the ranks, since the pods cannot read them: {error.problem}")
    return place + find_fabric(context.gpu_facts().devices)


def measure_places(nodes: Sequence[RunNode], workspace: Path, say: Say) -> list[RunNode]:
    """`nodes` with places by the bandwidths that a preflight of the workspace measured between all of them, if any."""
    from primus.machine.placement.measured_places import find_measured_places  # where no other source knows

    found = find_measured_places(workspace, {node.host for node in nodes})
    if found is None:
        return list(nodes)
    places, file = found
    say(f"where nodes stand is taken from the bandwidths in {file}")
    return [structs.replace(node, place=places[node.host]) for node in nodes]


def make_data_ring(world_size: int) -> RankGroups:
    """The one group of a job that does not say what its ranks exchange: a reduction over all of them."""
    return RankGroups(name="data-parallel group", size=world_size, stride=1, pattern="ring", link_bytes=1.0)


def locate_nodes(nodes: Sequence[RunNode], topology_file: str | None) -> list[RunNode]:
    """`nodes` with their places in a file of the site, which wins over what a node says of itself.

    Raises:
        UsageError: The file is wrong.
    """
    if topology_file is None:
        return list(nodes)
    from primus.machine.placement.topology_file import read_topology_file  # reads YAML, for a site's file only

    places = read_topology_file(Path(topology_file))
    short = {host.partition(".")[0]: place for host, place in places.items()}
    return [
        structs.replace(node, place=places.get(node.host) or short.get(node.host.partition(".")[0], ()))
        for node in nodes
    ]


def order_nodes(
    nodes: Sequence[RunNode],
    kinds: Sequence[RankGroups],
    ranks_per_node: int,
    earlier: NodesRecord | None = None,
    *,
    must_know: bool = False,
) -> NodesRecord:
    """The nodes by their new ranks, and what that gives.

    Nodes of an earlier start keep their ranks, so that a spare takes the place of the lost node.

    Args:
        nodes: In the scheduler's order; the first remains the first.
        kinds: What the ranks exchange; empty for a reduction over all of them.
        earlier: The nodes of the run, or of the run that it replays.
        must_know: Whether the user named a source of their places: then it is said if it names none of them.
    """
    absent = [node.host for node in nodes if not node.place]
    tree = build_switch_tree([() if absent else node.place for node in nodes])
    groups = place_groups_on_nodes(kinds or [make_data_ring(len(nodes) * ranks_per_node)], len(nodes), ranks_per_node)
    order = choose_order(tree, groups, _find_kept_nodes(nodes, earlier))
    summary = summarize_order(tree, groups, order)
    if absent and (len(absent) < len(nodes) or must_know):
        names = ", ".join(absent[:MOST_NAMED]) + ", ..." * (len(absent) > MOST_NAMED)
        summary = (
            f"nodes are not ordered by the network: where {len(absent)} of {len(nodes)} stand is unknown ({names})"
        )
    return NodesRecord(nodes=tuple(nodes[index] for index in order), summary=summary)


def _find_kept_nodes(nodes: Sequence[RunNode], earlier: NodesRecord | None) -> dict[int, int]:
    """Index in `nodes` of each node that keeps its rank of an earlier start of the same size."""
    if earlier is None or len(earlier.nodes) != len(nodes):
        return {}
    hosts = [node.host for node in nodes]
    if len(set(hosts)) < len(hosts):  # several nodes on a machine, which a name does not tell apart
        return {}
    index = {host: number for number, host in enumerate(hosts)}
    ranks = enumerate(node.host for node in earlier.nodes)
    # Node 0 is where the workers meet, whoever was it before.
    return {rank: index[host] for rank, host in ranks if rank and index.get(host)}
