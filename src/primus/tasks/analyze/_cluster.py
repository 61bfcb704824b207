"""The nodes of a cluster below their switches, and the order of ranks that a job would have on them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from msgspec import Struct

from primus.errors import UsageError
from primus.launch.node_order import make_data_ring, order_nodes
from primus.machine.placement.rank_groups import GroupsTraffic, NodeGroups, RankGroups, place_groups_on_nodes
from primus.machine.placement.rank_order import SwitchTree, build_switch_tree, measure_level
from primus.machine.placement.topology_file import read_topology_file
from primus.preflight.findings.node import format_ranges
from primus.report import table
from primus.report.cluster_page import TRAFFIC_HEADER, format_cluster_page, list_traffic_rows
from primus.runs.node_record import RunNode, read_nodes_record
from primus.runs.store import find_run


class ClusterTopology(Struct, frozen=True, kw_only=True):
    """Nodes below their switches, with the groups of a job."""

    nodes: tuple[RunNode, ...]
    """By node rank."""
    summary: str
    crossing: list[GroupsTraffic]
    """What crosses a leaf, for each kind of groups."""
    crossing_as_scheduled: list[GroupsTraffic]


class RankedCluster(Struct, frozen=True):
    """A cluster whose nodes have ranks."""

    tree: SwitchTree
    """The nodes in the scheduler's order."""
    groups: list[NodeGroups]
    topology: ClusterTopology
    has_bytes: bool
    """Whether an experiment says how much the groups send."""

    @property
    def order(self) -> tuple[int, ...]:
        """The nodes by node rank."""
        return tuple(node.scheduler_rank for node in self.topology.nodes)

    @property
    def hosts(self) -> list[str]:
        """Names of the nodes in the scheduler's order."""
        return [node.host for node in sorted(self.topology.nodes, key=lambda node: node.scheduler_rank)]

    def format_text(self) -> str:
        """The line about the order, what crosses a leaf, and the nodes of each leaf with their ranks."""
        ranks: dict[tuple[str, ...], list[int]] = {}
        for rank, node in enumerate(self.topology.nodes):
            ranks.setdefault(node.place, []).append(rank)
        leaves = [("/".join(place), format_ranges(numbers)) for place, numbers in sorted(ranks.items())]
        parts = [
            self.topology.summary,
            table.format_table(TRAFFIC_HEADER, self._list_rows(), right=(2, 3, 4)),
            table.format_table(("switches", "node ranks"), leaves),
        ]
        return "\n\n".join(part for part in parts if part)

    def _list_rows(self) -> list[tuple[str, str, str, str, str]]:
        found = self.topology
        return list_traffic_rows(found.crossing, found.crossing_as_scheduled, with_bytes=self.has_bytes)

    def format_page(self) -> str:
        """The same as a page."""
        rows = self._list_rows()
        return format_cluster_page(self.hosts, self.tree, self.groups, self.order, self.topology.summary, rows)


def rank_cluster(
    file: str | None, run: str | None, config: str | None, nproc: int, environ: Mapping[str, str]
) -> RankedCluster:
    """The nodes of a topology file or of a run, ranked for a job.

    Args:
        file: Topology file.
        run: Run folder or name.
        config: Experiment of the job; None for a reduction over all ranks.
        nproc: Ranks on a node.
        environ: Variables that the experiment may name.

    Raises:
        UsageError: A file is wrong, or the ranks cannot be divided as the experiment says.
    """
    nodes = _list_file_nodes(file) if file else _list_run_nodes(run)
    world_size = len(nodes) * nproc
    kinds = _list_groups(config, world_size, environ)
    record = order_nodes(nodes, kinds, nproc)
    tree = build_switch_tree([node.place for node in nodes])
    groups = place_groups_on_nodes(kinds, len(nodes), nproc)
    order = [node.scheduler_rank for node in record.nodes]
    topology = ClusterTopology(
        nodes=record.nodes,
        summary=record.summary,
        crossing=measure_level(tree.leaves, groups, order),
        crossing_as_scheduled=measure_level(tree.leaves, groups, range(len(nodes))),
    )
    return RankedCluster(tree, groups, topology, has_bytes=config is not None)


def _list_file_nodes(file: str) -> list[RunNode]:
    """The nodes of a file in the order in which a scheduler lists them, which is that of the alphabet."""
    places = sorted(read_topology_file(Path(file)).items())
    return [RunNode(host=host, scheduler_rank=rank, place=place) for rank, (host, place) in enumerate(places)]


def _list_run_nodes(name: str | None) -> list[RunNode]:
    if name is None:
        raise UsageError("--nodes: which nodes?", "add --assume-cluster FILE with their switches, or --run RUN")
    run = find_run(name, Path("output"))
    record = read_nodes_record(run)
    if record is None:
        raise UsageError(f"{run.directory}: this run has no record of several nodes", "name a run of several nodes")
    return sorted(record.nodes, key=lambda node: node.scheduler_rank)


def _list_groups(config: str | None, world_size: int, environ: Mapping[str, str]) -> Sequence[RankGroups]:
    if config is None:
        return [make_data_ring(world_size)]
    from primus import experiment
    from primus.config.checks import data_parallel_size
    from primus.models.communication import list_rank_groups

    trainer = experiment.resolve_experiment(Path(config), (), environ, is_elsewhere=True).experiment.trainer
    data_parallel_size(trainer.parallel, world_size)
    return list_rank_groups(trainer, world_size)
