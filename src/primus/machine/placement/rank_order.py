"""The order of nodes by which the groups of a job send least between switches.

    all arrangements    where few are different: nodes below one switch are interchangeable
    packed blocks       otherwise: the nodes of heavy groups become blocks, and blocks fill the switches one after the
                        other; then pairs of nodes swap while that saves something

The scheduler's order is the first candidate, and wins where none is better.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import combinations, cycle, islice

from msgspec import Struct

from primus.machine.placement.rank_groups import GroupsTraffic, NodeGroups, measure_traffic

Place = tuple[str, ...]
"""The switches above a node, from the outermost to the innermost: ``("spine1", "leaf3")``."""

MOST_ARRANGEMENTS = 5040
"""Arrangements that are all tried: those of 7 nodes beside node 0, each below its own switch."""
LEAST_GAIN = 1 - 1e-9
"""A smaller part of the cost is rounding, for which no node changes its rank."""
MOST_SWAPPED_NODES = 10_000
"""Nodes of all orders that swaps try, some 10 ms: swaps repair uneven switches of some dozens of nodes, and the
packing of thousands needs no repair."""


class SwitchTree(Struct, frozen=True):
    """The switches above nodes."""

    levels: tuple[tuple[int, ...], ...]
    """For each level, from the outermost, the number of the switch of each node. A level that has one switch, or one
    for each node, is left out: no order changes what crosses it."""
    names: tuple[Place, ...]
    """The switches above each node."""

    @property
    def leaves(self) -> tuple[int, ...]:
        """Number of the innermost switch of each node."""
        return self.levels[-1] if self.levels else (0,) * len(self.names)


def build_switch_tree(places: Sequence[Place]) -> SwitchTree:
    """The tree of switches above nodes.

    A switch is told from another by its whole path: two spines may have a leaf of the same name.
    """
    levels = []
    for depth in range(1, max(map(len, places), default=0) + 1):
        numbers: dict[Place, int] = {}
        level = tuple(numbers.setdefault(place[:depth], len(numbers)) for place in places)
        if 1 < len(numbers) < len(places) and level not in levels:
            levels.append(level)
    return SwitchTree(tuple(levels), tuple(places))


def choose_order(
    tree: SwitchTree, groups: Sequence[NodeGroups], kept: Mapping[int, int] | None = None
) -> tuple[int, ...]:
    """The nodes, by their numbers in the scheduler's order, in the order of their new node ranks.

    What crosses a switch of two levels counts twice. Node 0 remains node 0.

    Args:
        kept: Node at each node rank that must not change, such as the nodes of an earlier attempt.
    """
    num_nodes = len(tree.names)
    fixed = {0: 0, **(kept or {})}
    candidates = [_fill_in_order(num_nodes, fixed)]
    if tree.levels and groups:
        free_nodes = sorted(set(range(num_nodes)) - set(fixed.values()))
        if len(fixed) == 1:
            candidates += _list_packed_orders(tree, groups)
        if _count_arrangements([tree.leaves[node] for node in free_nodes]) <= MOST_ARRANGEMENTS:
            candidates += _list_arrangements(tree, fixed, free_nodes)
        elif len(fixed) == 1:
            return _swap_nodes(tree, groups, _pick_cheapest(tree, groups, candidates))
    return _pick_cheapest(tree, groups, candidates)


def measure_cost(tree: SwitchTree, groups: Sequence[NodeGroups], order: Sequence[int]) -> float:
    """Bytes that cross switches in a step, summed over the levels, with the nodes in `order`."""
    return sum(each.bytes for level in tree.levels for each in measure_level(level, groups, order))


def measure_level(level: Sequence[int], groups: Sequence[NodeGroups], order: Sequence[int]) -> list[GroupsTraffic]:
    """What each kind of groups sends between the switches of a level, with the nodes in `order`."""
    switches = [level[node] for node in order]
    return [measure_traffic(each, switches) for each in groups]


def _pick_cheapest(
    tree: SwitchTree, groups: Sequence[NodeGroups], orders: Iterable[tuple[int, ...]]
) -> tuple[int, ...]:
    """The first of the orders that cost least."""
    best: tuple[int, ...] = ()
    cost = math.inf
    for order in orders:
        if (each := measure_cost(tree, groups, order)) < cost * LEAST_GAIN:
            best, cost = order, each
    return best


def _fill_in_order(num_nodes: int, fixed: Mapping[int, int]) -> tuple[int, ...]:
    """The scheduler's order around the nodes that keep their ranks."""
    free = iter(sorted(set(range(num_nodes)) - set(fixed.values())))
    return tuple(fixed[rank] if rank in fixed else next(free) for rank in range(num_nodes))


def _count_arrangements(leaves: Sequence[int]) -> int:
    """Different arrangements of nodes, where those of one leaf are interchangeable."""
    return math.factorial(len(leaves)) // math.prod(math.factorial(number) for number in Counter(leaves).values())


def _list_arrangements(tree: SwitchTree, fixed: Mapping[int, int], nodes: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Every different arrangement of `nodes` on the ranks that are not fixed; those of one leaf keep their order."""
    of_leaf: dict[int, list[int]] = {}
    for node in nodes:
        of_leaf.setdefault(tree.leaves[node], []).append(node)
    num_used = dict.fromkeys(of_leaf, 0)
    order = [fixed.get(rank, -1) for rank in range(len(tree.names))]
    free_ranks = [rank for rank, node in enumerate(order) if node < 0]

    def arrange(position: int) -> Iterator[tuple[int, ...]]:
        if position == len(free_ranks):
            yield tuple(order)
            return
        for leaf, members in of_leaf.items():
            if num_used[leaf] < len(members):
                order[free_ranks[position]] = members[num_used[leaf]]
                num_used[leaf] += 1
                yield from arrange(position + 1)
                num_used[leaf] -= 1

    return arrange(0)


def _list_packed_orders(tree: SwitchTree, groups: Sequence[NodeGroups]) -> Iterator[tuple[int, ...]]:
    """Orders in which blocks of groups fill the leaves, for each kind as the innermost one."""
    heaviest_first = sorted(groups, key=lambda each: -sum(each.link_bytes) * len(each.members[0]))
    nodes_by_leaf = _list_leaves(tree)
    for kind in heaviest_first:
        blocks = [[rank] for rank in range(len(tree.names))]
        for each in (kind, *(other for other in heaviest_first if other is not kind)):
            blocks = _merge_blocks(blocks, each)
            yield _pack_blocks(blocks, nodes_by_leaf)


def _swap_nodes(tree: SwitchTree, groups: Sequence[NodeGroups], order: tuple[int, ...]) -> tuple[int, ...]:
    """`order` after swaps of two nodes that each reduce its cost."""
    best, cost = list(order), measure_cost(tree, groups, order)
    num_tries, since_gain = MOST_SWAPPED_NODES // len(order), 0
    pairs = list(islice(combinations(range(1, len(order)), 2), num_tries))
    for first, second in islice(cycle(pairs), num_tries):
        since_gain += 1
        if since_gain > len(pairs):
            break
        if tree.leaves[best[first]] == tree.leaves[best[second]]:
            continue
        best[first], best[second] = best[second], best[first]
        if (swapped := measure_cost(tree, groups, best)) < cost * LEAST_GAIN:
            cost, since_gain = swapped, 0
        else:
            best[first], best[second] = best[second], best[first]
    return tuple(best)


def _list_leaves(tree: SwitchTree) -> list[list[int]]:
    """The nodes of each leaf; leaves of one switch beside each other, those of node 0 first."""
    keys = list(zip(*tree.levels, strict=True))  # switches are numbered as the scheduler's order meets them
    leaves: dict[tuple[int, ...], list[int]] = {}
    for node in sorted(range(len(keys)), key=lambda node: (keys[node], node)):
        leaves.setdefault(keys[node], []).append(node)
    return list(leaves.values())


def _merge_blocks(blocks: Sequence[Sequence[int]], kind: NodeGroups) -> list[list[int]]:
    """Blocks of node ranks that share a group of `kind`, merged; in the order of their first ranks."""
    block_of = {rank: number for number, block in enumerate(blocks) for rank in block}
    root = list(range(len(blocks)))

    def find_root(number: int) -> int:
        while root[number] != number:
            root[number] = number = root[root[number]]
        return number

    for nodes in kind.members:
        numbers = sorted({find_root(block_of[node]) for node in nodes})
        for number in numbers[1:]:
            root[number] = numbers[0]
    merged: dict[int, list[int]] = {}
    for number, block in enumerate(blocks):
        merged.setdefault(find_root(number), []).extend(block)
    return list(merged.values())


def _pack_blocks(blocks: Sequence[Sequence[int]], nodes_by_leaf: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """An order in which each block lies in the first leaf with room for it; blocks that fit nowhere share the rest."""
    room = [list(reversed(nodes)) for nodes in nodes_by_leaf]
    order = [-1] * sum(map(len, nodes_by_leaf))
    divided = []
    for block in blocks:
        # Node 0 keeps rank 0, which stands in the first block, and is the first node of the first leaf.
        leaves = room[:1] if block[0] == 0 else room
        leaf = next((leaf for leaf in leaves if len(leaf) >= len(block)), None)
        if leaf is None:
            divided.append(block)
            if block[0] == 0:
                order[0] = room[0].pop()
            continue
        for rank in block:
            order[rank] = leaf.pop()
    rest = (node for leaf in room for node in reversed(leaf))
    for rank in (rank for block in divided for rank in block):
        if order[rank] < 0:
            order[rank] = next(rest)
    return tuple(order)
