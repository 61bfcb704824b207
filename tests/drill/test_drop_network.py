"""A node without a network: two network namespaces of this machine, joined by a cable."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from cluster.test_slurm import LIGHT, STEPS
from fakes import cli

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("ip"), reason="needs root, and ip (iproute2)"),
]
SCRIPT = "import sys\nfrom primus.cli.main import main\nsys.exit(main())"
LIMIT_S = 900


def ip(*words: str) -> str:
    return subprocess.run(["ip", *words], check=True, capture_output=True, text=True, timeout=20).stdout


@pytest.fixture
def hosts() -> Iterator[list[str]]:
    """Two namespaces with the addresses 10.213.7.1 and .2, each with a route to a third network."""
    names = [f"drill{os.getpid()}-{number}" for number in (1, 2)]
    try:
        for name in names:
            ip("netns", "add", name)
        ip("-n", names[0], "link", "add", "cable0", "type", "veth", "peer", "name", "cable0", "netns", names[1])
        for number, name in enumerate(names, 1):
            ip("-n", name, "link", "set", "lo", "up")
            ip("-n", name, "addr", "add", f"10.213.7.{number}/24", "dev", "cable0")
            ip("-n", name, "link", "set", "cable0", "up")
            ip("-n", name, "route", "add", "10.214.0.0/16", "via", f"10.213.7.{3 - number}", "dev", "cable0")
        yield names
    except subprocess.CalledProcessError as error:
        pytest.skip(f"no network namespaces: {error.stderr}")
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


def test_a_node_without_network_is_lost_comes_back_and_the_job_resumes(hosts: list[str], tmp_path: Path) -> None:
    (tmp_path / "light.yaml").write_text(LIGHT.replace(f"train_iters: {STEPS}", "train_iters: 1000000"))
    before = [ip("-n", name, "route") for name in hosts]
    drill = ["drill", "--minutes", "14", "--steps", "60", "--output", "drilled", "--faults", "drop-network"]
    drill += ["--network-interface", "cable0", "--", "train", "pretrain", "--config", "light.yaml"]
    with ExitStack() as stack:
        processes = []
        for rank, name in enumerate(hosts):
            place = ["--nproc", "1", "--nnodes", "2", "--node-rank", str(rank), "--master-addr", "10.213.7.1"]
            command = [sys.executable, "-c", SCRIPT, "direct", *place, "--", *drill]
            # A host name of its own, by which the run blames a node.
            named = ["unshare", "--uts", "sh", "-c", 'hostname "$0" && exec "$@"', f"h{rank}", *command]
            process = subprocess.Popen(
                ["ip", "netns", "exec", name, *named],
                cwd=tmp_path,
                env=cli.environment(),
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            stack.callback(process.kill)
            processes.append(process)
        outputs = [process.communicate(timeout=LIMIT_S)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], outputs
    (case,) = json.loads((tmp_path / "drilled/drill.json").read_text())["cases"]
    assert (case["state"], case["host"], case["blamed_hosts"]) == ("recovered", "h1", ["h1"])
    assert (case["is_blame_right"], case["restarted_by"]) == (True, "scheduler")
    assert 20 < case["detect_s"] < 60
    assert case["losses"]["num_after"] == case["losses"]["num_equal_after"] > 0
    assert [ip("-n", name, "route") for name in hosts] == before, "addresses and routes are there again"
