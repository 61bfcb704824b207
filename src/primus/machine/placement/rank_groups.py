"""What the ranks of a job exchange in a step, and what that means for its nodes.

NCCL and RCCL connect the ranks of a group in the order of their numbers: a reduction or a gather travels along the
ring, a pipeline along the chain, and an all-to-all uses every pair. They do not look at the network between nodes
(https://github.com/NVIDIA/nccl/issues/1340).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Literal

from msgspec import Struct

Pattern = Literal["ring", "chain", "all-to-all"]
"""Which members of a group exchange: neighbors with the last one beside the first, neighbors, or all."""


class RankGroups(Struct, frozen=True, kw_only=True):
    """The groups of one kind, all of one size: the ranks of a group differ by multiples of `stride`."""

    name: str
    """What a group is called in a sentence: ``expert group``."""
    size: int
    """Ranks of a group."""
    stride: int
    """Distance of neighbors: 1 where the group is made of consecutive ranks."""
    pattern: Pattern
    link_bytes: float
    """Bytes that two members that exchange send each other in a step, both directions together."""


class NodeGroups(Struct, frozen=True, kw_only=True):
    """The groups of one kind as they lie on nodes, by node rank; groups within one node are left out."""

    name: str
    pattern: Pattern
    members: tuple[tuple[int, ...], ...]
    """Node ranks of each group in the order of its ranks."""
    link_bytes: tuple[float, ...]
    """Bytes between two nodes of each group that exchange, in a step."""


def place_groups_on_nodes(kinds: Iterable[RankGroups], num_nodes: int, ranks_per_node: int) -> list[NodeGroups]:
    """The groups that span nodes, where consecutive ranks fill the nodes one after the other.

    Groups with the same nodes, such as those of the eight GPUs of a node, become one with the sum of their bytes.

    Raises:
        ValueError: The ranks cannot be divided into groups of a kind.
    """
    return [found for kind in kinds if (found := _place_kind(kind, num_nodes, ranks_per_node)).members]


def _place_kind(kind: RankGroups, num_nodes: int, ranks_per_node: int) -> NodeGroups:
    span = kind.size * kind.stride
    world_size = num_nodes * ranks_per_node
    if world_size % span:
        raise ValueError(f"{world_size} ranks are not divisible into groups of {kind.size} with stride {kind.stride}")
    totals: dict[tuple[int, ...], float] = {}
    for block in range(0, world_size, span):
        for first in range(block, block + kind.stride):
            ranks = range(first, block + span, kind.stride)
            nodes = tuple(dict.fromkeys(rank // ranks_per_node for rank in ranks))
            if len(nodes) > 1:
                per_node = kind.size // len(nodes)
                # Between two nodes a ring or chain has one link; of an all-to-all, every pair of their ranks.
                added = kind.link_bytes * (per_node**2 if kind.pattern == "all-to-all" else 1)
                totals[nodes] = totals.get(nodes, 0.0) + added
    return NodeGroups(name=kind.name, pattern=kind.pattern, members=tuple(totals), link_bytes=tuple(totals.values()))


class GroupsTraffic(Struct, frozen=True, kw_only=True):
    """What the groups of one kind send between switches of one level in a step."""

    name: str
    num_groups: int
    num_crossing: int
    """Groups whose nodes stand below more than one switch."""
    num_links: int
    """Pairs of nodes that exchange and stand below different switches."""
    bytes: float


def measure_traffic(groups: NodeGroups, switches: Sequence[int]) -> GroupsTraffic:
    """What `groups` send between the switches of one level.

    Args:
        switches: Number of the switch of each node, by node rank.
    """
    num_crossing = num_links = 0
    total = 0.0
    for nodes, link_bytes in zip(groups.members, groups.link_bytes, strict=True):
        links = _count_crossing_links([switches[node] for node in nodes], groups.pattern)
        if links:
            num_crossing += 1
            num_links += links
            total += links * link_bytes
    return GroupsTraffic(
        name=groups.name,
        num_groups=len(groups.members),
        num_crossing=num_crossing,
        num_links=num_links,
        bytes=total,
    )


def _count_crossing_links(switches: Sequence[int], pattern: Pattern) -> int:
    if pattern == "all-to-all":
        return (len(switches) ** 2 - sum(number**2 for number in Counter(switches).values())) // 2
    num_links = sum(map(int.__ne__, switches, switches[1:]))
    # Of two members the ring has one link, as the chain has.
    return num_links + (pattern == "ring" and len(switches) > 2 and switches[0] != switches[-1])
