"""Bandwidths between nodes show the switches above them, and slow nodes or links do not."""

from __future__ import annotations

import itertools
import json
import random
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from primus.errors import UsageError
from primus.machine.placement.measured_places import cluster_nodes, find_measured_places
from primus.machine.placement.rank_order import build_switch_tree
from primus.machine.placement.topology_file import read_topology_file

Rate = Callable[[int, int], float]


def measure(num_nodes: int, rate: Rate, seed: int = 1) -> dict[tuple[str, str], float]:
    """Bandwidth of each pair with 5 % of noise."""
    draw = random.Random(seed)
    pairs = itertools.combinations(range(num_nodes), 2)
    return {(f"n{a}", f"n{b}"): rate(a, b) * draw.uniform(0.95, 1.05) for a, b in pairs}


def test_pairs_below_a_leaf_are_faster_than_over_a_spine_and_those_than_between_spines() -> None:
    found = cluster_nodes(measure(16, lambda a, b: 48.0 if a % 4 == b % 4 else 24.0 if a % 2 == b % 2 else 12.0))
    tree = build_switch_tree([found[f"n{node}"] for node in range(16)])
    spines, leaves = tree.levels
    assert spines == tuple(node % 2 for node in range(16))
    assert leaves == tuple(node % 4 for node in range(16))


@pytest.mark.parametrize(
    "rate",
    [
        pytest.param(lambda a, b: 48.0, id="all pairs are alike"),
        pytest.param(lambda a, b: 10.0 if 3 in (a, b) else 48.0, id="a slow node"),
        pytest.param(lambda a, b: 10.0 if (a, b) == (2, 3) else 48.0, id="a slow link"),
        pytest.param(lambda a, b: 48.0 if b == a + 1 else 20.0, id="a chain, which no switch is"),
    ],
)
def test_what_is_no_switch_makes_no_places(rate: Rate) -> None:
    assert cluster_nodes(measure(8, rate)) == {}


def test_a_slow_node_beside_two_leaves_is_a_place_of_its_own() -> None:
    found = cluster_nodes(measure(9, lambda a, b: 5.0 if b == 8 else 48.0 if a % 2 == b % 2 else 24.0))
    tree = build_switch_tree([found[f"n{node}"] for node in range(9)])
    assert tree.leaves[:8] == tuple(node % 2 for node in range(8))


def test_an_incomplete_scan_makes_no_places() -> None:
    found = measure(8, lambda a, b: 48.0 if a % 2 == b % 2 else 24.0)
    assert cluster_nodes(found)
    found.popitem()
    assert cluster_nodes(found) == {}
    assert cluster_nodes({}) == {}


def test_hundreds_of_nodes_take_a_moment() -> None:
    found = measure(256, lambda a, b: 48.0 if a // 16 == b // 16 else 24.0)
    began = time.process_time()
    places = cluster_nodes(found)
    assert len({*places.values()}) == 16
    assert time.process_time() - began < 2


def write_results(workspace: Path, run: str, hosts: list[str], backend: str = "nccl") -> Path:
    """What a preflight of two ranks on each node writes: the first of each node scans with those of the others."""
    ranks = [{"rank": 2 * n + i, "node": n, "local_rank": i, "host": h} for n, h in enumerate(hosts) for i in (0, 1)]
    pairs = [
        {"first": 2 * a, "second": 2 * b, "round": 0, "between_nodes": True, "size_bytes": 1, "gb_per_s": rate}
        for a, b in itertools.combinations(range(len(hosts)), 2)
        for rate in (40.0 if hosts[a][0] == hosts[b][0] else 20.0,)
    ]
    pairs.append({"first": 0, "second": 1, "round": 0, "between_nodes": False, "size_bytes": 1, "gb_per_s": 400.0})
    file = workspace / "preflight" / run / "report/performance.json"
    file.parent.mkdir(parents=True)
    file.write_text(json.dumps({"backend": backend, "world_size": len(ranks), "ranks": ranks, "pairs": pairs}))
    return file


def test_the_newest_preflight_of_all_nodes_counts(tmp_path: Path) -> None:
    assert find_measured_places(tmp_path, {"a1"}) is None
    wanted = write_results(tmp_path, "20260102_000000-aaaa", ["a1", "b1", "a2", "b2", "a3"])
    write_results(tmp_path, "20260103_000000-aaaa", ["a1", "a2", "b7", "b8"])
    write_results(tmp_path, "20260104_000000-aaaa", ["a1", "b1", "a2", "b2"], backend="gloo")
    broken = write_results(tmp_path, "20260105_000000-aaaa", ["a1", "b1", "a2", "b2"])
    broken.write_text("{")
    found = find_measured_places(tmp_path, {"a1", "b1", "a2", "b2"})
    assert found is not None
    places, file = found
    assert file == wanted
    assert places["a1"] == places["a2"] != places["b1"] == places["b2"]


def test_results_of_a_preflight_are_a_topology_file(tmp_path: Path) -> None:
    places = read_topology_file(write_results(tmp_path, "20260102_000000-aaaa", ["a1", "b1", "a2", "b2"]))
    assert places["a1"] == places["a2"] != places["b1"]
    alike = write_results(tmp_path, "20260103_000000-aaaa", ["a1", "a2", "a3"])
    with pytest.raises(UsageError, match=r"performance.json shows no groups of nodes"):
        read_topology_file(alike)
    alike.write_text("[]")
    with pytest.raises(UsageError, match=r"performance.json: not the results of a preflight"):
        read_topology_file(alike)
