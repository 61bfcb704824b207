"""What an order of nodes gives, in one line."""

from __future__ import annotations

from collections.abc import Sequence

from primus.machine.placement.rank_groups import GroupsTraffic, NodeGroups
from primus.machine.placement.rank_order import SwitchTree, measure_level


def summarize_order(tree: SwitchTree, groups: Sequence[NodeGroups], order: Sequence[int]) -> str:
    """The groups that cross a leaf switch with the nodes in `order` and in the scheduler's order; empty where no order
    matters."""
    if not tree.levels or not groups:
        return ""
    chosen = measure_level(tree.leaves, groups, order)
    scheduled = measure_level(tree.leaves, groups, range(len(tree.names)))
    # Groups that cross in any order, such as the only data-parallel one, are compared by their links.
    by_links = [
        min(new.num_crossing, old.num_crossing) == new.num_groups for new, old in zip(chosen, scheduled, strict=True)
    ]
    parts = [_format_traffic(each, links) for each, links in zip(chosen, by_links, strict=True)]
    head = f"{len(tree.names)} nodes under {len(set(tree.leaves))} leaves: {_join(parts)} cross a leaf"
    if list(order) == list(range(len(tree.names))):
        return f"{head}, in the scheduler's order"
    before = [
        str(each.num_links if links else each.num_crossing) for each, links in zip(scheduled, by_links, strict=True)
    ]
    return f"{head}; in the scheduler's order {_join(before)}"


def _format_traffic(traffic: GroupsTraffic, by_links: bool) -> str:
    plural = "s" * (traffic.num_groups != 1)
    if by_links:
        return f"{traffic.num_links} links of {traffic.num_groups} {traffic.name}{plural}"
    return f"{traffic.num_crossing} of {traffic.num_groups} {traffic.name}{plural}"


def _join(parts: Sequence[str]) -> str:
    return " and ".join([", ".join(parts[:-1]), parts[-1]] if len(parts) > 1 else parts)
