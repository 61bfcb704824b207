"""The order of nodes by which the groups of a job send least between switches."""

from __future__ import annotations

import itertools
import random
import time

import pytest

from primus.machine.placement.order_summary import summarize_order
from primus.machine.placement.rank_groups import NodeGroups, RankGroups, place_groups_on_nodes
from primus.machine.placement.rank_order import (
    Place,
    SwitchTree,
    build_switch_tree,
    choose_order,
    measure_cost,
    measure_level,
)


def make_layout(
    tp: int, cp: int, ep: int, pp: int, world_size: int, weights: random.Random | None = None
) -> list[RankGroups]:
    dp = world_size // (tp * cp * pp)
    sizes = (
        ("tensor-parallel group", tp, 1, "ring", 100.0),
        ("context-parallel group", cp, tp, "ring", 10.0),
        ("expert group", ep, tp, "all-to-all", 5.0),
        ("data-parallel group", dp * cp, tp, "ring", 3.0),
        ("pipeline", pp, tp * cp * dp, "chain", 1.0),
    )
    return [
        RankGroups(
            name=name,
            size=size,
            stride=stride,
            pattern=pattern,  # type: ignore[arg-type]
            link_bytes=heavy * (weights.random() if weights else 1.0),
        )
        for name, size, stride, pattern, heavy in sizes
        if size > 1
    ]


def draw_layout(draw: random.Random, num_nodes: int, per_node: int) -> list[NodeGroups]:
    world_size = num_nodes * per_node

    def choose_divisor(number: int) -> int:
        return draw.choice([each for each in range(1, number + 1) if number % each == 0])

    tp = choose_divisor(per_node)
    cp = draw.choice([each for each in (1, 2, 4) if world_size % (tp * each) == 0])
    pp = choose_divisor(world_size // (tp * cp))
    ep = choose_divisor(world_size // (tp * pp))
    return place_groups_on_nodes(make_layout(tp, cp, ep, pp, world_size, draw), num_nodes, per_node)


def draw_tree(draw: random.Random, num_nodes: int) -> SwitchTree:
    num_spines, num_leaves = draw.randint(1, 4), draw.randint(1, 5)
    return build_switch_tree(
        [(f"spine{draw.randrange(num_spines)}", f"leaf{draw.randrange(num_leaves)}") for _ in range(num_nodes)]
    )


def test_no_order_sends_less_between_switches_than_the_chosen_one_of_few_nodes() -> None:
    draw = random.Random(1)
    for _ in range(150):
        num_nodes = draw.randint(2, 7)
        groups, tree = draw_layout(draw, num_nodes, draw.choice([1, 2, 4, 8])), draw_tree(draw, num_nodes)
        orders = ((0, *rest) for rest in itertools.permutations(range(1, num_nodes)))
        best = min(measure_cost(tree, groups, order) for order in orders)
        assert measure_cost(tree, groups, choose_order(tree, groups)) == pytest.approx(best, rel=1e-9)


def test_the_chosen_order_never_sends_more_than_the_schedulers_order() -> None:
    draw = random.Random(2)
    gains = []
    for _ in range(1000):
        num_nodes = draw.choice([3, 5, 7, 9, 16])
        groups, tree = draw_layout(draw, num_nodes, draw.choice([1, 4, 8])), draw_tree(draw, num_nodes)
        order = choose_order(tree, groups)
        assert order[0] == 0
        assert sorted(order) == list(range(num_nodes))
        scheduled = measure_cost(tree, groups, range(num_nodes))
        chosen = measure_cost(tree, groups, order)
        assert chosen <= scheduled
        gains.append(chosen / scheduled if scheduled else 1.0)
    assert sorted(gains)[500] < 0.8  # a random order of a random tree is far from a good one


def test_nodes_keep_the_schedulers_order_where_none_is_better() -> None:
    ring = place_groups_on_nodes(make_layout(1, 1, 1, 1, 6), 6, 1)
    assert choose_order(build_switch_tree([("a",)] * 3 + [("b",)] * 3), ring) == (0, 1, 2, 3, 4, 5)
    assert choose_order(build_switch_tree([("a",), ("b",)] * 3), ring) == (0, 2, 4, 1, 3, 5)
    assert choose_order(build_switch_tree([()] * 6), ring) == (0, 1, 2, 3, 4, 5)


def test_leaves_of_one_name_below_two_spines_are_two_leaves() -> None:
    ring = place_groups_on_nodes(make_layout(1, 1, 1, 1, 8), 8, 1)
    tree = build_switch_tree([(f"spine{i % 2}", f"leaf{i // 2 % 2}") for i in range(8)])
    assert len(set(tree.leaves)) == 4
    order = choose_order(tree, ring)
    assert [tree.names[node][0] for node in order] == ["spine0"] * 4 + ["spine1"] * 4


def test_nodes_of_an_earlier_start_keep_their_ranks_and_a_spare_takes_the_free_one() -> None:
    ring = place_groups_on_nodes(make_layout(1, 1, 1, 1, 6), 6, 1)
    tree = build_switch_tree([("a",), ("b",), ("a",), ("b",), ("a",), ("b",)])
    earlier = {1: 2, 2: 4, 3: 1, 5: 3}  # the node at rank 4 is lost, node 5 is new
    assert choose_order(tree, ring, earlier) == (0, 2, 4, 1, 5, 3)


def test_of_two_spares_the_one_of_the_leaf_takes_its_place() -> None:
    ring = place_groups_on_nodes(make_layout(1, 1, 1, 1, 6), 6, 1)
    tree = build_switch_tree([("a",), ("b",), ("a",), ("b",), ("b",), ("a",)])
    assert choose_order(tree, ring, {1: 2, 3: 1, 5: 3}) == (0, 2, 5, 1, 4, 3)


def test_expert_groups_come_below_one_leaf_before_pipelines() -> None:
    places: list[Place] = [(f"leaf{i % 4}",) for i in range(64)]
    groups = place_groups_on_nodes(make_layout(8, 1, 8, 4, 512), 64, 8)
    tree = build_switch_tree(places)
    line = summarize_order(tree, groups, choose_order(tree, groups))
    assert line.startswith("64 nodes under 4 leaves: 0 of 8 expert groups")
    assert "; in the scheduler's order 8" in line


def test_a_line_compares_groups_that_cross_in_any_order_by_their_links() -> None:
    groups = place_groups_on_nodes(make_layout(8, 1, 1, 1, 64), 8, 8)
    tree = build_switch_tree([(f"leaf{i % 2}",) for i in range(8)])
    line = summarize_order(tree, groups, choose_order(tree, groups))
    assert line == "8 nodes under 2 leaves: 2 links of 1 data-parallel group cross a leaf; in the scheduler's order 8"
    assert summarize_order(tree, groups, range(8)).endswith(
        "8 links of 1 data-parallel group cross a leaf, in the scheduler's order"
    )
    assert summarize_order(build_switch_tree([("leaf",)] * 8), groups, range(8)) == ""


def test_groups_are_laid_on_nodes_with_the_bytes_of_all_ranks() -> None:
    kinds = make_layout(tp=2, cp=1, ep=4, pp=2, world_size=16)
    tensor, expert, data, pipeline = kinds
    on_nodes = {each.name: each for each in place_groups_on_nodes(kinds, 4, 4)}
    assert tensor.name not in on_nodes  # within a node
    assert on_nodes[expert.name].members == ((0, 1), (2, 3))
    # Two experts' groups, each of two ranks on either node: four pairs of ranks send.
    assert on_nodes[expert.name].link_bytes == (2 * 4 * expert.link_bytes,) * 2
    assert on_nodes[data.name].link_bytes == (2 * data.link_bytes,) * 2
    assert on_nodes[pipeline.name].members == ((0, 2), (1, 3))
    assert on_nodes[pipeline.name].link_bytes == (4 * pipeline.link_bytes,) * 2


def test_ranks_that_do_not_divide_into_groups_are_refused() -> None:
    with pytest.raises(ValueError, match="12 ranks are not divisible into groups of 8 with stride 1"):
        place_groups_on_nodes([RankGroups(name="g", size=8, stride=1, pattern="ring", link_bytes=1.0)], 3, 4)


def test_groups_that_fill_a_leaf_leave_the_rest_of_larger_ones_to_each_other() -> None:
    places: list[Place] = [(f"leaf{i}-{size}",) for i in range(64) for size in (6, 4) for _ in range(size)]
    random.Random(4).shuffle(places)
    groups = place_groups_on_nodes(make_layout(8, 1, 4, 1, 8 * 640), 640, 8)
    tree = build_switch_tree(places)
    expert, _ = measure_level(tree.leaves, groups, choose_order(tree, groups))
    # Each leaf holds one group of four; of the two nodes that larger ones have left, 32 groups are made.
    assert (expert.num_groups, expert.num_crossing) == (160, 32)


def test_thousands_of_nodes_are_ordered_within_a_second() -> None:
    num_nodes = 4096
    places: list[Place] = [(f"spine{i // 512}", f"leaf{i // 16}") for i in range(num_nodes)]
    random.Random(3).shuffle(places)
    began = time.process_time()
    groups = place_groups_on_nodes(make_layout(8, 1, 16, 16, 8 * num_nodes), num_nodes, 8)
    tree = build_switch_tree(places)
    order = choose_order(tree, groups)
    taken = time.process_time() - began
    crossing = {each.name: each.num_crossing for each in measure_level(tree.leaves, groups, order)}
    assert crossing["expert group"] == 0, "groups of 16 nodes fill leaves of 16 nodes"
    assert measure_cost(tree, groups, order) < 0.5 * measure_cost(tree, groups, range(num_nodes))
    assert taken < 3, taken  # 0.4 s alone on a core of 2026; the limit leaves room for a busy machine
