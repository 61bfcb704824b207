"""`analyze topology --nodes`: the nodes of a cluster, and the ranks that a job would have on them."""

from __future__ import annotations

import json
from pathlib import Path

from fakes import cli

EXAMPLES = Path(__file__).parents[2] / "examples"
CLUSTER = str(EXAMPLES / "cluster-512.yaml")
MOE = """extends: {examples}/llama3.1_8B-pretrain.yaml
exp_name: moe
modules:
  pre_trainer:
    framework: megatron
    model: mixtral_8x22B_v0.1.yaml
    overrides: {{tensor_model_parallel_size: 8, pipeline_model_parallel_size: 4, expert_model_parallel_size: 8,
                global_batch_size: 512}}
"""
ANALYZE = ("direct", "--", "analyze", "topology", "--nodes")


def test_the_order_of_a_large_cluster_keeps_expert_groups_below_a_leaf(tmp_path: Path) -> None:
    (tmp_path / "moe.yaml").write_text(MOE.format(examples=EXAMPLES))
    words = (*ANALYZE, "--assume-cluster", CLUSTER, "--config", "moe.yaml")
    done = cli.run("--json", *words, cwd=tmp_path)
    found = json.loads(done.stdout)
    assert [node["host"] for node in found["nodes"]][:2] == ["node001", "node033"]
    assert found["summary"].startswith("512 nodes under 32 leaves: 0 of 64 expert groups")
    chosen, scheduled = ({each["name"]: each for each in found[key]} for key in ("crossing", "crossing_as_scheduled"))
    assert (chosen["expert group"]["num_crossing"], scheduled["expert group"]["num_crossing"]) == (0, 64)
    assert sum(each["bytes"] for each in chosen.values()) < sum(each["bytes"] for each in scheduled.values()) / 4
    shown = cli.run(*words, "--visualize", cwd=tmp_path).stdout
    assert "spine1/leaf01  0-15" in shown
    page = (tmp_path / "topology.html").read_text()
    assert page.count('title="node') == 2 * 512
    assert "A color is one expert group" in page


def test_nodes_need_a_source_and_a_page(tmp_path: Path) -> None:
    assert "add --assume-cluster FILE" in cli.run(*ANALYZE, cwd=tmp_path).stderr
    drawn = cli.run(*ANALYZE, "--assume-cluster", CLUSTER, "--output", "nodes.svg", cwd=tmp_path)
    assert (drawn.returncode, "nodes are drawn on a page" in drawn.stderr) == (2, True)
