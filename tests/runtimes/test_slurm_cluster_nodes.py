"""Nodes of Slurm by state, and the options of a job on one of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from fakes.slurm import FakeSlurm
from primus.errors import UsageError
from primus.runtime import ClusterNode, NodeJob
from primus.runtimes.slurm.cluster_nodes import list_nodes, select_node


@pytest.mark.parametrize(
    ("line", "state", "reason", "gpus"),
    [
        ("idle|gpu:mi300x:8(S:0-1)|none", "idle", "", 8),
        ("idle*|(null)|none", "down", "does not respond", 0),
        ("idle~|gpu:8|none", "down", "powered down", 8),
        ("idle@|gpu:8|none", "busy", "idle@", 8),
        ("planned|gpu:a:4,gpu:b:4,nvme:1|none", "idle", "", 8),
        ("idle-|gpu:8|none", "idle", "", 8),
        ("mixed|gpu:8|none", "busy", "mixed", 8),
        ("reserved|gpu:8|none", "busy", "reserved", 8),
        ("drained|gpu:8|fan | row 3", "drained", "fan | row 3", 8),
        ("draining*|gpu:8|none", "drained", "draining*", 8),
        ("down*|gpu:8|Not responding", "down", "Not responding", 8),
        ("unknown|gpu:8|none", "down", "unknown", 8),
    ],
)
def test_a_node_has_one_state(line: str, state: str, reason: str, gpus: int, tmp_path: Path) -> None:
    slurm = FakeSlurm(tmp_path / "bin")
    slurm.answers(sinfo=f"for i in 1 2; do echo 'n1|{line}'; done")  # of two partitions
    (node,) = list_nodes(("srun", "-p", "gpu"), slurm.environ)
    assert (node.state, node.reason, node.gpus) == (state, reason, gpus)
    assert "--partition=gpu" in slurm.argv("sinfo")


def test_options_of_the_user_take_precedence() -> None:
    job = NodeJob(node=ClusterNode(name="n1", state="idle"), name="check-x-n1", limit_s=90.0, start_s=60.0)
    words = select_node(("srun", "-p", "gpu", "-t", "5", "--nice=9"), job)
    assert words[:6] == ("srun", "-p", "gpu", "-t", "5", "--nice=9")
    assert set(words[6:]) == {"--nodes=1", "--nodelist=n1", "--job-name=check-x-n1", "--exclusive", "--immediate=60"}
    named = NodeJob(node=job.node, name=job.name, limit_s=90.0)
    assert "--time=2" in select_node(("srun",), named)
    assert not any(word.startswith("--immediate") for word in select_node(("srun",), named)), "it waits for its node"
    with pytest.raises(UsageError, match="use slurm srun"):
        select_node(("sbatch",), job)
