"""A node is compared with the site's file; the file is written from a fit node, and its mistakes are explained."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from fakes import cli
from fakes.nodes import node as build_facts
from primus.errors import UsageError
from primus.machine.facts import Limits, MachineFacts, Memory, Software
from primus.machine.host import dimms
from primus.machine.tree import FileTree
from primus.preflight.checks import site as site_checks
from primus.preflight.findings import site
from primus.preflight.findings.finding import CheckFinding
from primus.preflight.findings.node import NodeExpectations, PreflightNode

GIB = 1 << 30
FULL = build_facts()
HEALTHY = structs.replace(
    FULL,
    devices=tuple(structs.replace(card, firmware={"vbios": "113-M3000100-102"}) for card in FULL.devices),
    rdma=tuple(structs.replace(device, hca_type="MT4129", firmware="28.39.1002") for device in FULL.rdma),
    memory=Memory(total_bytes=2015 * GIB),
    limits=Limits(memlock_bytes=None, nofile=1 << 20, shm_bytes=1007 * GIB),
    software=Software(os="Ubuntu 22.04.4 LTS", kernel="5.15.0-105-generic", amd_driver="6.12.12", rocm="6.4.1"),
)
MOUNTS = """\
overlay / overlay rw 0 0
filer:/home /home nfs4 rw,relatime,vers=4.2 0 0
10.0.0.1@o2ib:/fs /data\\040set lustre rw,flock 0 0
"""
DMIDECODE = """\
Handle 0x0020, DMI type 17, 92 bytes
Memory Device
	Total Width: 80 bits
	Size: 96 GB
	Locator: {}
	Speed: 5600 MT/s
	Configured Memory Speed: {} MT/s

Handle 0x0021, DMI type 17, 92 bytes
Memory Device
	Size: No Module Installed
	Locator: DIMM_A2
"""


def machine(
    tmp_path: Path,
    facts: MachineFacts = HEALTHY,
    expected: site.SiteExpectations | None = None,
    mounts: str = MOUNTS,
    num_dimms: int = 24,
) -> PreflightNode:
    """A recorded node whose kernel lists its mounts and its memory modules."""
    files = {"proc/self/mounts": mounts}
    for number in range(num_dimms):
        folder = f"sys/devices/system/edac/mc/mc0/dimm{number}"
        files |= {f"{folder}/size": "98304\n", f"{folder}/dimm_label": f"P0_DIMM_{number}"}
    for path, text in files.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    return PreflightNode(facts=facts, tree=FileTree(tmp_path), expected=NodeExpectations(site=expected))


def all_findings(node: PreflightNode) -> list[CheckFinding]:
    checks = (
        site_checks.check_gpus,
        site_checks.check_nics,
        site_checks.check_software,
        site_checks.check_host,
        site_checks.check_mounts,
    )
    return [finding for check in checks for finding in check(node)]


def bad(node: PreflightNode) -> dict[tuple[str, str], tuple[str, str]]:
    """What was measured and expected, by check and subject."""
    return {(one.check, one.subject): (one.measured, one.expected) for one in all_findings(node) if one.status != "ok"}


@pytest.fixture
def healthy_site(tmp_path: Path) -> site.SiteExpectations:
    """Written from a healthy node and read again."""
    site.save(site_checks.build_expectations(machine(tmp_path / "healthy")), tmp_path / "site.yaml")
    return site.load(tmp_path / "site.yaml")


def test_a_node_meets_the_expectations_that_were_written_from_it(
    tmp_path: Path, healthy_site: site.SiteExpectations
) -> None:
    assert healthy_site == site_checks.build_expectations(machine(tmp_path / "healthy"))
    node = machine(tmp_path / "same", expected=healthy_site)
    assert bad(node) == {}
    assert len(all_findings(node)) > 40


DEGRADED: dict[str, tuple[MachineFacts, dict[str, Any], tuple[str, str], str]] = {
    "a GPU is missing": (
        structs.replace(HEALTHY, devices=HEALTHY.devices[:7]), {}, ("gpu.expect_count", ""), "7 GPUs",
    ),
    "an older VBIOS": (
        structs.replace(HEALTHY, devices=(structs.replace(HEALTHY.devices[0], firmware={"vbios": "113-OLD"}),)),
        {}, ("gpu.expect_firmware", "GPU 0 vbios"), "113-OLD",
    ),
    "a NIC is down to half its rate": (
        structs.replace(
            HEALTHY,
            rdma=(
                structs.replace(HEALTHY.rdma[0], ports=(structs.replace(HEALTHY.rdma[0].ports[0], rate_gbps=200),)),
                *HEALTHY.rdma[1:],
            ),
        ),
        {}, ("network.expect_rate", "mlx5_0 port 1"), "200 Gb/s",
    ),
    "another NIC firmware": (
        structs.replace(HEALTHY, rdma=(structs.replace(HEALTHY.rdma[0], firmware="28.36"), *HEALTHY.rdma[1:])),
        {}, ("network.expect_firmware", "mlx5_0"), "28.36",
    ),
    "a module of memory is lost": (HEALTHY, {"num_dimms": 23}, ("host.expect_dimms", ""), "23 modules"),
    "less memory": (
        structs.replace(HEALTHY, memory=Memory(total_bytes=1920 * GIB)), {}, ("host.expect_memory", ""), "1920 GiB",
    ),
    "a mount is lost": (
        HEALTHY, {"mounts": MOUNTS.replace("nfs4", "").replace("filer:/home /home", "")},
        ("storage.expect_mount", "/home"), "not mounted",
    ),
    "a read-only mount": (
        HEALTHY, {"mounts": MOUNTS.replace("lustre rw", "lustre ro")},
        ("storage.expect_mount", "/data set"), "without rw",
    ),
    "another driver": (
        structs.replace(HEALTHY, software=structs.replace(HEALTHY.software, amd_driver="6.8.5")),
        {}, ("software.expect_amd_driver", ""), "6.8.5",
    ),
    "a lower limit of locked memory": (
        structs.replace(HEALTHY, limits=structs.replace(HEALTHY.limits, memlock_bytes=8 << 20)),
        {}, ("host.expect_memlock", ""), "0.0078125 GiB",
    ),
}  # fmt: skip


@pytest.mark.parametrize("fault", DEGRADED)
def test_what_a_node_lacks_is_named(tmp_path: Path, healthy_site: site.SiteExpectations, fault: str) -> None:
    facts, files, name, measured = DEGRADED[fault]
    found = bad(machine(tmp_path / "node", facts, healthy_site, **files))
    assert found[name][0] == measured
    assert found[name][1]


@pytest.mark.parametrize(
    ("text", "problem", "hint"),
    [
        ("gpu:\n  count: 8\n", "site.yaml:2: unknown key 'gpu'", "gpus"),
        ("gpus:\n  count: 8\n  modell: MI300X\n", "site.yaml:3: unknown key 'modell'", "model"),
        ("gpus:\n  count: eight\n", "site.yaml:2: count: expected int", ""),
        ("memory: 2 TB\n", "site.yaml:1: memory is not a mapping", "--write-expect"),
        ("mounts:\n  /home:\n    typ: nfs4\n", "site.yaml:3: unknown key 'typ'", "type"),
        ("", "is empty", ""),
    ],
)
def test_a_mistake_in_the_file_names_the_line_and_the_nearest_key(
    tmp_path: Path, text: str, problem: str, hint: str
) -> None:
    (tmp_path / "site.yaml").write_text(text)
    with pytest.raises(UsageError) as raised:
        site.load(tmp_path / "site.yaml")
    assert problem in str(raised.value)
    assert hint in (raised.value.hint or "")


def test_versions_are_taken_as_written_and_several_may_be_accepted(tmp_path: Path) -> None:
    (tmp_path / "site.yaml").write_text("nics: {firmware: {MT4129: [28.39, 28.40]}}\nsoftware: {rocm: 6.10}\n")
    read = site.load(tmp_path / "site.yaml")
    assert read.software.rocm == ("6.10",)
    assert read.nics.firmware["MT4129"][0] == "28.39"


def test_modules_are_read_from_dmidecode_without_empty_slots() -> None:
    found = dimms.parse_dmidecode("\n".join(DMIDECODE.format(f"DIMM_A{number}", 4800) + "\n" for number in range(12)))
    assert [(dimm.size_bytes, dimm.speed_mts) for dimm in found] == [(96 * GIB, 4800)] * 12
    assert dimms.compute_peak_gb_per_s(found) == pytest.approx(460.8)  # 12 channels of DDR5-4800
    assert dimms.compute_peak_gb_per_s([structs.replace(found[0], speed_mts=None)]) is None


def test_the_command_writes_a_file_that_the_same_node_meets_and_another_does_not(tmp_path: Path) -> None:
    words = ("direct", "--nproc", "1", "--", "preflight", "--host", "--software", "--ignore", "host.shm", "--json")
    written = cli.run(*words, "--write-expect", "site.yaml", cwd=tmp_path)
    assert written.returncode == 0, written.stderr
    again = cli.run(*words, "--expect", "site.yaml", cwd=tmp_path)
    assert again.returncode == 0, again.stdout
    assert "host.expect_cores" in again.stdout or "host.expect_threads" in again.stdout
    text = (tmp_path / "site.yaml").read_text()
    (tmp_path / "site.yaml").write_text(text.replace("threads: ", "threads: 9"))
    other = cli.run(*words, "--expect", "site.yaml", cwd=tmp_path)
    assert other.returncode == 3
    found = [one for node in json.loads(other.stdout)["report"]["nodes"] for one in node["findings"]]
    assert [one["check"] for one in found if one["status"] == "fail"] == ["host.expect_threads"]
    refused = cli.run(*words, "--write-expect", "site.yaml", cwd=tmp_path)
    assert refused.returncode == 2
    assert "the file exists" in refused.stderr


def test_the_example_of_the_documentation_is_read(tmp_path: Path) -> None:
    page = (Path(__file__).parents[3] / "docs/preflight.md").read_text()
    example = page.partition("## Site file")[2].partition("```yaml\n")[2].partition("```")[0]
    (tmp_path / "site.yaml").write_text(example)
    read = site.load(tmp_path / "site.yaml")
    assert read.mounts["/shared"].min_free_gib == 500
    assert (read.memory.dimms, read.limits.memlock_gib) == (24, "unlimited")


def test_memory_modules_that_nothing_lists_are_unknown_and_why(tmp_path: Path) -> None:
    found, problem = site_checks.read_dimms(machine(tmp_path / "some", num_dimms=2))
    assert (len(found), problem) == (2, "")
    found, problem = site_checks.read_dimms(machine(tmp_path / "none", num_dimms=0))
    assert found == [] and "neither dmidecode (root) nor the kernel's EDAC driver" in problem
