"""Nodes of a real Slurm with switches: where they are placed, and which ranks they get."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from cluster.test_slurm import Cluster
from primus.runs.node_record import NodesRecord, read_nodes_record
from primus.runs.store import Run

pytestmark = [pytest.mark.cluster("slurm"), pytest.mark.slow]

TRAIN = ("train", "pretrain", "--config", "light.yaml", "--train_iters", "3", "--global_batch_size", "12")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Six nodes, in turn below three leaves of two spines: n1 and n4, n2 and n5, n3 and n6."""
    place = Cluster(tmp_path_factory.mktemp("cluster"))
    try:
        place.script("up", "6", "3")
        yield place
    finally:
        place.script("down")


def train(cluster: Cluster, name: str, *direct: str, nodes: str = "6") -> tuple[NodesRecord, str]:
    words = ("slurm", "srun", "-N", nodes, "--", "direct", "--nproc", "1", *direct, "--", *TRAIN, "--exp_name", name)
    done = cluster.primus(*words)
    record = read_nodes_record(Run((cluster.folder / "output" / name / "latest").resolve()))
    assert record is not None
    return record, done.stdout


def test_nodes_below_a_switch_are_neighbors_in_rank(cluster: Cluster) -> None:
    record, said = train(cluster, "near")
    assert [node.host for node in record.nodes] == ["n1", "n4", "n2", "n5", "n3", "n6"]
    assert record.nodes[2].place == ("core", "spine1", "leaf2")
    line = "6 nodes under 3 leaves: 3 links of 1 data-parallel group cross a leaf; in the scheduler's order 6"
    assert line in said
    folder = cluster.folder / "output/near/latest"
    assert f"on {record.nodes[1].host}\n" in (folder / "logs/launch.node_1.log").read_text()
    replayed, _ = replay(cluster, "near")
    assert [node.host for node in replayed.nodes] == [node.host for node in record.nodes]


def replay(cluster: Cluster, name: str) -> tuple[NodesRecord, str]:
    before = (cluster.folder / "output" / name / "latest").resolve()
    words = (
        "slurm",
        "srun",
        "-N",
        "6",
        "--",
        "direct",
        "--nproc",
        "1",
        "--",
        "train",
        "pretrain",
        "--replay",
        str(before),
    )
    said = cluster.primus(*words).stdout
    run = Run((cluster.folder / "output" / name / "latest").resolve())
    record = read_nodes_record(run)
    assert run.directory != before
    assert record is not None
    return record, said


def test_ranks_follow_the_scheduler_on_request_and_the_file_of_a_site(cluster: Cluster) -> None:
    record, said = train(cluster, "scheduler", "--rank-order", "scheduler", nodes="4")
    assert [node.host for node in record.nodes] == ["n1", "n2", "n4", "n5"]  # Slurm takes one spine
    assert "cross a leaf" not in said
    (cluster.folder / "site.yaml").write_text("rack1: n[1,4]\nrack2: n[2,5]\n")
    record, said = train(cluster, "site", "--topology-file", "site.yaml", nodes="4")
    assert [node.host for node in record.nodes] == ["n1", "n4", "n2", "n5"]
    (cluster.folder / "site.yaml").write_text("rack1: n[1,4]\n")
    record, said = train(cluster, "gap", "--topology-file", "site.yaml", nodes="4")
    assert "nodes are not ordered by the network: where 2 of 4 stand is unknown (n2, n5)" in said


def test_slurm_places_a_job_below_the_fewest_leaves(cluster: Cluster) -> None:
    words = ("--json", "slurm", "sbatch", "--wait", "-N", "2", "--placement", "near")
    shown = cluster.primus(*words, "--", *TRAIN, "--exp_name", "placed").stdout
    values, _ = json.JSONDecoder().raw_decode(shown)
    record = read_nodes_record(Run(Path(values["run"])))
    assert record is not None
    assert len({node.place for node in record.nodes}) == 1
    shown = cluster.ask("scontrol", "show", "job", values["id"]).stdout
    assert "Switches=1@00:05:00" in shown
    refused = cluster.primus("slurm", "sbatch", "-N", "3", "--placement", "leaf", "--", *TRAIN, code=2)
    assert "the largest leaf has 2 nodes, 3 are asked for" in refused.stderr
