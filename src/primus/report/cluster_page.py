"""The nodes of a cluster below their switches, as a page: which rank each has, and which groups cross a leaf."""

from __future__ import annotations

from collections.abc import Sequence

from primus.machine.placement.rank_groups import GroupsTraffic, NodeGroups
from primus.machine.placement.rank_order import SwitchTree
from primus.report import table
from primus.report.page import Html, format_page, join_fragments, make_element, make_paragraph, make_table

HUE_STEP = 137.5
"""Degrees between the colors of neighboring groups: the golden angle, so that no two of some dozens look alike."""
STYLE = """
.switch { border: 1px solid var(--line); border-radius: 8px; padding: 0.5rem; margin: 0.5rem 0; }
.switch > strong { display: block; font-size: 0.82rem; color: var(--soft); margin-bottom: 0.25rem; }
.leaves { display: flex; flex-wrap: wrap; gap: 0.5rem; }
.leaves > .switch { margin: 0; }
.nodes { display: grid; grid-template-columns: repeat(4, auto); gap: 3px; }
.nodes span { min-width: 2.4em; padding: 0 0.2em; border-radius: 4px; text-align: center; font-size: 0.78rem;
  border: 2px solid transparent; color: #111; }
.nodes span.cut { border: 2px dashed var(--fail); }
"""
TRAFFIC_HEADER = ("groups", "order", "cross a leaf", "links", "bytes a step")


def list_traffic_rows(
    chosen: Sequence[GroupsTraffic], scheduled: Sequence[GroupsTraffic], *, with_bytes: bool
) -> list[tuple[str, str, str, str, str]]:
    """Rows below `TRAFFIC_HEADER`: each kind of groups in both orders."""
    return [
        (
            f"{each.num_groups} {each.name}{'s' * (each.num_groups != 1)}" if order == "network" else "",
            order,
            str(each.num_crossing),
            str(each.num_links),
            table.format_size(int(each.bytes)) if with_bytes else "-",
        )
        for pair in zip(chosen, scheduled, strict=True)
        for each, order in zip(pair, ("network", "scheduler"), strict=True)
    ]


def format_cluster_page(
    hosts: Sequence[str],
    tree: SwitchTree,
    groups: Sequence[NodeGroups],
    order: Sequence[int],
    summary: str,
    traffic: Sequence[Sequence[str]],
) -> str:
    """The page.

    Args:
        hosts: Names of the nodes in the scheduler's order, as in `tree`.
        tree: The switches above them.
        groups: What the nodes exchange.
        order: The nodes by node rank.
        summary: What the order gives, in a line.
        traffic: Rows below `TRAFFIC_HEADER`.
    """
    leaves = tree.leaves
    # The innermost kind of several groups: of a single one, every node has the color.
    shown = next((each for each in groups if len(each.members) > 1), None)
    legend = "A number is a node rank."
    if shown:
        legend += f" A color is one {shown.name}; it is dashed where it crosses a leaf."
    return format_page(
        f"{len(hosts)} nodes under {len(set(leaves))} leaves",
        [
            ("", join_fragments(Html(f"<style>{STYLE}</style>"), make_paragraph(summary))),
            ("What crosses a leaf", make_table(TRAFFIC_HEADER, traffic, right=(2, 3, 4))),
            ("Ranks by the network", join_fragments(make_paragraph(legend), _draw(hosts, tree, shown, order))),
            ("Ranks in the scheduler's order", _draw(hosts, tree, shown, range(len(hosts)))),
        ],
    )


def _draw(hosts: Sequence[str], tree: SwitchTree, shown: NodeGroups | None, order: Sequence[int]) -> Html:
    """Boxes of the switches above the leaves, with boxes of the leaves and the nodes in them."""
    rank_of = {node: rank for rank, node in enumerate(order)}
    members = shown.members if shown else ()
    group_of = {rank: number for number, nodes in enumerate(members) for rank in nodes}
    cut = {number for number, nodes in enumerate(members) if len({tree.leaves[order[rank]] for rank in nodes}) > 1}
    above: dict[tuple[str, ...], dict[tuple[str, ...], list[int]]] = {}
    for node, place in enumerate(tree.names):
        above.setdefault(place[:-1], {}).setdefault(place, []).append(node)
    boxes = []
    for spine, of_leaf in sorted(above.items()):
        drawn = [
            _make_box(
                leaf[-1] if leaf else "",
                "nodes",
                [_make_cell(hosts[node], rank_of[node], group_of, cut) for node in nodes],
            )
            for leaf, nodes in sorted(of_leaf.items())
        ]
        boxes.append(_make_box(" / ".join(spine), "leaves", drawn))
    return join_fragments(*boxes)


def _make_box(name: str, kind: str, parts: Sequence[Html]) -> Html:
    inner = make_element("div", join_fragments(*parts), class_=kind)
    return make_element("div", join_fragments(make_element("strong", name), inner), class_="switch")


def _make_cell(host: str, rank: int, group_of: dict[int, int], cut: set[int]) -> Html:
    group = group_of.get(rank)
    color = f"background: hsl({group * HUE_STEP % 360:.0f} 60% 72%)" if group is not None else ""
    return make_element(
        "span", rank, title=f"{host}, node rank {rank}", style=color, class_="cut" if group in cut else ""
    )
