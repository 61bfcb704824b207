"""`env report`: what an issue needs, and nothing about who runs primus, where, and with which secrets."""

from __future__ import annotations

import json
import platform
import re
from pathlib import Path

import pytest

from fakes import cli
from primus import registry
from primus.machine.assumed_machine import build_assumed_machine
from primus.machine.facts import MachineFacts, MachineProblem, RdmaDevice, RdmaPort, Software
from primus.task import TASKS

report = registry.load_plug_in(TASKS, "env report")

PRIVATE = {
    "USER": "annexample",
    "LOGNAME": "annexample",
    "HOSTNAME": "loginnode7.corp.example",
    "HF_TOKEN": "cnry-token",
    "WANDB_API_KEY": "cnry-key",
    "NCCL_COMM_ID": "otherhost9:29500",
    "NCCL_TOPO_FILE": "/lustre/cnryproject/topo.xml",
    "PRIMUS_TEAM": "cnryteam",
    "PRIMUS_PLUGINS": "/home/annexample/cnryplugins",
    "PRIMUS_SAFE_TOKEN": "cnry-safe-token",
    "CUDA_MASTER_HOST": "cnryhost",
    "SLURM_JOB_ACCOUNT": "cnryaccount",
    "MASTER_ADDR": "10.1.2.3",
    "SOMETHING_OF_MINE": "cnryvalue",
}
PUBLIC = {
    "NCCL_DEBUG": "INFO",
    "NCCL_IB_HCA": "mlx5_0:1,mlx5_1:1",
    "NCCL_SOCKET_IFNAME": "eth0",
    "OMP_NUM_THREADS": "8",
}


@pytest.mark.parametrize("option", ["", "--json"])
def test_the_report_of_this_machine_has_no_name_no_address_and_no_secret(tmp_path: Path, option: str) -> None:
    home = tmp_path / "annexample"
    home.mkdir()
    words = [*option.split(), "direct", "--", "env", "report"]
    done = cli.run(*words, cwd=tmp_path, timeout_s=60, HOME=str(home), **PRIVATE, **PUBLIC)
    assert done.returncode == 0, done.stderr
    for text in ("cnry", "annexample", "loginnode7", "corp.example", "otherhost9", "lustre", "10.1.2.3", str(tmp_path)):
        assert text not in done.stdout
    for name in filter(None, (platform.node(), platform.node().partition(".")[0])):
        assert not re.search(rf"(?<![\w.-]){re.escape(name)}(?![\w-])", done.stdout)
    if option:
        found = json.loads(done.stdout)["variables"]
        assert {name: found.get(name) for name in PUBLIC} == PUBLIC
        assert found["NCCL_COMM_ID"] == found["PRIMUS_SAFE_TOKEN"] == found["PRIMUS_TEAM"] == "(set)"
        assert not found.keys() & {"HF_TOKEN", "SLURM_JOB_ACCOUNT", "MASTER_ADDR", "SOMETHING_OF_MINE"}
    else:
        assert done.stdout.startswith("### Versions\n\n- primus: ")
        assert "- `NCCL_IB_HCA=mlx5_0:1,mlx5_1:1`\n" in done.stdout


def test_a_node_is_described_by_counts_and_versions() -> None:
    port = RdmaPort(state="ACTIVE", physical_state="LinkUp", rate_gbps=400.0, link_layer="InfiniBand")
    nics = tuple(
        RdmaDevice(name=f"mlx5_{n}", kind="mellanox", hca_type="MT4129", firmware="28.39", ports=(port,))
        for n in range(8)
    )
    problem = MachineProblem(
        "/home/annexample/bin/amd-smi", "loginnode7 (fe:ed:00:aa:bb:cc, 10.1.2.3) refused annexample@corp.example"
    )
    facts = MachineFacts(
        host="loginnode7.corp.example",
        devices=build_assumed_machine("mi300x:8").devices,
        rdma=nics,
        software=Software(os="Ubuntu 24.04", kernel="6.8.0", amd_driver="6.14.5", rocm="7.2.0"),
        problems=(problem,),
    )
    found = report.build_report(facts, {"USER": "annexample"})
    assert found.machine["GPUs"] == "8 x MI300X (gfx942, SPX)"
    assert found.machine["RDMA NICs"] == "8 x mellanox MT4129, firmware 28.39 (InfiniBand 400 Gbit/s ACTIVE)"
    assert {"ROCm": "7.2.0", "AMD driver": "6.14.5", "kernel": "6.8.0"}.items() <= found.versions.items()
    assert found.problems == ["/home/<user>/bin/amd-smi: <host> (<address>, <address>) refused <address>"]


def test_only_packages_of_other_versions_are_listed_and_none_that_is_not_public(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    installed = {"pyyaml": "1.0", "torch": "2.13.0+rocm7.2", "acme-internal-tools": "3", "typing_extensions": "1.0"}
    monkeypatch.setattr(report, "list_package_versions", lambda folders: installed)
    assert report.build_report(MachineFacts(), {}).packages == {"pyyaml": "1.0", "typing_extensions": "1.0"}
