"""NVIDIA cards are read from NVML (here a library with the same functions), else from the driver's files."""

from __future__ import annotations

import shutil
import subprocess
import time
from pathlib import Path

import pytest
from msgspec import structs
from tests.machine.test_health import nvidia_smi

from fakes.tools import tool
from machines.tree import grow
from primus.machine import pci
from primus.machine.facts import Device, MachineFacts
from primus.machine.health import read_health
from primus.machine.nvidia import devices as nvidia
from primus.machine.nvidia import health as health_nvidia
from primus.machine.nvidia import nvml
from primus.machine.probe import probe
from primus.machine.tools.vitals import RowRemapping
from primus.machine.tree import FileTree

NVML = r"""
#include <stdio.h>
#include <string.h>
#include <unistd.h>
typedef struct { char legacy[16]; unsigned domain, bus, device, ids, subsystem; char bus_id[32]; } pci_t;
typedef struct { unsigned long long total, free, used; } memory_t;
static int cards[2] = {0x1b, 0x43};
int nvmlInit_v2(void) { if (HANG) sleep(20); return BROKEN; }
int nvmlShutdown(void) { return 0; }
int nvmlDeviceGetCount_v2(unsigned *n) { *n = 2; return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned i, void **h) { *h = &cards[i]; return i == 0 && LOST ? 15 : 0; }
static int info(int bus, pci_t *p) {
  p->ids = 0x233010de; snprintf(p->bus_id, 32, "00000000:%02X:00.0", bus); return 0;
}
int nvmlDeviceGetPciInfo_v3(void *h, pci_t *p) { return info(*(int *)h, p); }
int nvmlDeviceGetMemoryInfo(void *h, memory_t *m) {
  m->total = 85520809984ULL; m->used = 4ULL << 20; return UNSUPPORTED ? 3 : 0;
}
int nvmlDeviceGetCudaComputeCapability(void *h, int *a, int *b) { *a = 9; *b = 0; return 0; }
int nvmlDeviceGetName(void *h, char *t, unsigned n) { strncpy(t, "NVIDIA H100 80GB HBM3", n); return 0; }
int nvmlDeviceGetUUID(void *h, char *t, unsigned n) { snprintf(t, n, "GPU-%08x-0000", *(int *)h); return 0; }
int nvmlDeviceGetTemperature(void *h, unsigned s, unsigned *c) { *c = 32; return 0; }
int nvmlDeviceGetTotalEnergyConsumption(void *h, unsigned long long *mj) { *mj = 1500500; return UNSUPPORTED ? 3 : 0; }
int nvmlDeviceGetTotalEccErrors(void *h, unsigned type, unsigned counter, unsigned long long *n) {
  *n = type == 0 ? 7 : 1; return UNSUPPORTED ? 3 : 0;
}
int nvmlDeviceGetRemappedRows(void *h, unsigned *c, unsigned *u, unsigned *pending, unsigned *failed) {
  *c = 1; *u = 2; *pending = 1; *failed = *(int *)h == 0x43; return UNSUPPORTED ? 3 : 0;
}
int nvmlDeviceGetRowRemapperHistogram(void *h, unsigned *banks) {
  unsigned found[5] = {636, 2, 1, 1, 0}; memcpy(banks, found, sizeof found); return 0;
}
typedef struct { unsigned pid; unsigned long long memory; unsigned gpu, compute; } process_t;
int nvmlDeviceGetComputeRunningProcesses_v3(void *h, unsigned *n, process_t *p) {
  *n = 2; p[0].pid = 77; p[0].memory = 512ULL << 20; p[1].pid = 78; p[1].memory = ~0ULL; return 0;
}
typedef struct { unsigned char uuid[16]; int status; unsigned clique; unsigned char state; } fabric_t;
int nvmlDeviceGetGpuFabricInfo(void *h, fabric_t *f) {
  memset(f, 0, sizeof *f); f->uuid[0] = FABRIC ? 0x7b : 0; f->clique = 3; f->state = FABRIC == 2 ? 2 : 3; return 0;
}
int nvmlDeviceGetVbiosVersion(void *h, char *t, unsigned n) { return 3; }
int nvmlDeviceGetNvLinkState(void *h, unsigned l, unsigned *on) { *on = l < 4; return l < 6 ? 0 : 2; }
int nvmlDeviceGetNvLinkRemotePciInfo_v2(void *h, unsigned l, pci_t *p) {
  if (UNSUPPORTED) return 3;
  return info(SWITCH ? 0x07 : *(int *)h == 0x1b ? 0x43 : 0x1b, p);
}
"""


def library(folder: Path, **options: int) -> str:
    """A shared library that answers like NVML on a node with two cards."""
    compiler = shutil.which("cc") or pytest.skip("no C compiler")
    source, target = folder / "nvml.c", folder / "libnvml.so"
    source.write_text(NVML)
    names = ("HANG", "BROKEN", "SWITCH", "LOST", "UNSUPPORTED", "FABRIC")
    flags = [f"-D{name}={options.get(name, 0)}" for name in names]
    subprocess.run([compiler, "-shared", "-fPIC", "-w", *flags, "-o", target, source], check=True, timeout=60)
    return str(target)


@pytest.mark.parametrize("switch", [0, 1])
def test_nvml_gives_cards_memory_and_links(tmp_path: Path, switch: int) -> None:
    tree = FileTree()
    functions = [pci.PciFunction(f"0000:{bus}:00.0", pci.NVIDIA, 0x2330) for bus in ("1b", "43")]
    devices, links = nvidia.read_gpus(tree, functions, library(tmp_path, SWITCH=switch))
    assert [device.bdf for device in devices] == ["0000:1b:00.0", "0000:43:00.0"]
    first = devices[0]
    assert (first.model, first.architecture, first.memory_bytes) == ("H100", "sm90", 81559 << 20)
    assert (first.uuid, first.device_id, first.sources["memory_bytes"]) == ("GPU-0000001b-0000", 0x2330, "nvml")
    assert [(link.kind, link.first, link.second, link.num_links) for link in links] == [("nvlink", 0, 1, 4)]


def test_cards_of_a_domain_over_nodes_have_its_id(tmp_path: Path) -> None:
    functions = [pci.PciFunction(f"0000:{bus}:00.0", pci.NVIDIA, 0x2330) for bus in ("1b", "43")]
    for fabric, wanted in ((1, f"7b{'00' * 15}.3"), (0, None), (2, None)):  # a domain, one node alone, not registered
        (tmp_path / str(fabric)).mkdir()
        devices, _ = nvidia.read_gpus(FileTree(), functions, library(tmp_path / str(fabric), FABRIC=fabric))
        assert [device.fabric for device in devices] == [wanted] * 2


def test_a_library_that_is_not_there_or_fails_is_told(tmp_path: Path) -> None:
    tree = FileTree()
    assert nvml.read_nvml(tree, str(tmp_path / "none.so")) is None
    assert nvml.read_nvml(tree, library(tmp_path, BROKEN=9)) is None
    assert "nvmlInit_v2 failed: the driver is not loaded (code 9)" in tree.problems[1].problem


def test_a_lost_card_hides_no_other(tmp_path: Path) -> None:
    tree = FileTree()
    functions = [pci.PciFunction(f"0000:{bus}:00.0", pci.NVIDIA, 0x2330) for bus in ("1b", "43")]
    lost, sound = nvidia.read_gpus(tree, functions, library(tmp_path, LOST=1))[0]
    assert (lost.bdf, lost.model, lost.partitions, lost.memory_bytes) == ("0000:1b:00.0", "H100", (), None)
    assert (sound.bdf, sound.memory_bytes, len(sound.partitions)) == ("0000:43:00.0", 81559 << 20, 1)
    told = [problem.problem for problem in tree.problems]
    assert any("GPU 0: nvmlDeviceGetHandleByIndex_v2 failed: the GPU is lost" in problem for problem in told), told
    assert any("on the bus, but its driver does not list it" in problem for problem in told), told


def test_a_lost_card_counts_where_the_bus_is_not_shown(tmp_path: Path) -> None:
    assert [reading.is_lost for reading in nvml.read_nvml(FileTree(), library(tmp_path, LOST=1)) or ()] == [True, False]


def test_a_query_that_a_card_does_not_support_costs_that_value_only(tmp_path: Path) -> None:
    tree = FileTree()
    functions = [pci.PciFunction(f"0000:{bus}:00.0", pci.NVIDIA, 0x2330) for bus in ("1b", "43")]
    devices, links = nvidia.read_gpus(tree, functions, library(tmp_path, UNSUPPORTED=1))
    assert [(device.bdf, device.architecture, device.memory_bytes) for device in devices] == [
        ("0000:1b:00.0", "sm90", None),
        ("0000:43:00.0", "sm90", None),
    ]
    assert [(link.first, link.second, link.num_links) for link in links] == [(0, 1, 4)]
    assert tree.problems == []


CARDS = [Device(index=index, vendor="nvidia", bdf=f"0000:{bus}:00.0") for index, bus in enumerate(("1b", "43"))]


def test_the_library_tells_of_rows_errors_and_processes_where_there_is_no_tool(tmp_path: Path) -> None:
    tree = FileTree()
    first, second = health_nvidia.read_library_vitals(tree, CARDS, library(tmp_path)).values()
    assert (first.temperature_c, first.memory_used_bytes, first.ecc_correctable, first.ecc_uncorrectable) == (
        32, 4 << 20, 7, 1,
    )  # fmt: skip
    banks = {"max": 636, "high": 2, "partial": 1, "low": 1, "none": 0}
    rows = RowRemapping(corrected=1, uncorrected=2, is_pending=True, has_failed=False, banks=banks)
    assert first.energy_j == 1500.5
    assert first.remapping == rows and second.remapping == structs.replace(rows, has_failed=True)
    assert [(one.pid, one.memory_bytes) for one in first.processes or ()] == [(77, 512 << 20), (78, None)]
    assert tree.problems == []


def test_energy_is_asked_of_the_library_only_where_it_is_wanted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(health_nvidia.read_library_vitals, "__defaults__", (library(tmp_path),))
    answer = {"pci.bus_id": "00000000:1B:00.0", "memory.total": "81559 MiB", "memory.used": "4 MiB"}
    other = answer | {"pci.bus_id": "00000000:43:00.0"}
    environ = nvidia_smi(tmp_path, answer, other)
    facts = MachineFacts(devices=tuple(CARDS))
    assert [card.energy_j for card in read_health(facts, environ).devices] == [None, None]
    cards = read_health(facts, environ, with_energy=True).devices
    assert [(card.energy_j, card.sources["energy_j"]) for card in cards] == [(1500.5, "nvml")] * 2


def test_where_the_tool_hangs_the_library_is_not_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health_nvidia.read_library_vitals, "__defaults__", (library(tmp_path),))
    environ = tool(tmp_path / "bin", "nvidia-smi", "sleep 300")
    found = read_health(MachineFacts(devices=tuple(CARDS)), environ, 0.2, with_energy=True)
    assert found.calls and [card.sources for card in found.devices] == [{}, {}]


def test_cards_without_own_memory_lack_nothing_that_the_library_knows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(health_nvidia.read_library_vitals, "__defaults__", (library(tmp_path),))
    answers = [
        {"pci.bus_id": f"00000000:{bus}:00.0", "memory.total": "[N/A]", "memory.used": "[N/A]"} for bus in ("1B", "43")
    ]
    cards = read_health(MachineFacts(devices=tuple(CARDS)), nvidia_smi(tmp_path, *answers)).devices
    assert all(card.shares_host_memory and "nvml" not in card.sources.values() for card in cards)


def test_a_lost_card_and_unsupported_values_have_no_vitals(tmp_path: Path) -> None:
    lost = health_nvidia.read_library_vitals(FileTree(), CARDS, library(tmp_path, LOST=1))
    assert list(lost) == [1]
    (tmp_path / "other").mkdir()  # of one path a library is loaded once
    found = health_nvidia.read_library_vitals(FileTree(), CARDS, library(tmp_path / "other", UNSUPPORTED=1))[0]
    assert (found.memory_used_bytes, found.ecc_uncorrectable, found.remapping) == (None, None, None)
    assert found.shares_host_memory and found.processes


def test_a_library_without_newer_functions_is_still_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "NVML", NVML.replace("nvmlDeviceGetNvLinkState", "older"))
    devices, links = nvidia.read_gpus(
        FileTree(), [pci.PciFunction("0000:1b:00.0", pci.NVIDIA, 0x2330)], library(tmp_path)
    )
    assert [device.memory_bytes for device in devices] == [81559 << 20] * 2 and links == ()


def test_a_driver_that_is_stuck_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvml, "LIMIT_S", 0.2)
    tree = FileTree()
    began = time.monotonic()
    assert nvml.read_nvml(tree, library(tmp_path, HANG=1)) is None
    assert time.monotonic() - began < 5 and "no response" in tree.problems[0].problem


def test_the_drivers_files_name_cards(tmp_path: Path) -> None:
    facts = probe(grow("h100-8", tmp_path))
    assert facts.model == "H100" and len(facts.partitions) == 8 and facts.links == ()
    device = facts.devices[1]
    assert (device.bdf, device.name, device.device_id) == ("0000:43:00.0", "NVIDIA H100 80GB HBM3", 0x2330)
    assert (device.uuid, device.firmware) == ("GPU-8d1b0f3e-0000-4000-8000-000000000001", {"vbios": "96.00.74.00.01"})
    assert (device.pcie.width, device.numa_node, facts.devices[7].numa_node) == (16, 0, 1)
    assert device.memory_bytes is None and device.sources["name"] == "proc"


def test_a_card_that_fell_off_is_named(tmp_path: Path) -> None:
    root = grow("h100-8", tmp_path)
    shutil.rmtree(root / "proc/driver/nvidia/gpus/0000:61:00.0")
    (root / "proc/driver/nvidia/gpus/0000:9d:00.0/information").write_text("")
    facts = probe(root)
    assert len(facts.devices) == 8 and len(facts.partitions) == 7
    told = "\n".join(f"{problem.where}: {problem.problem}" for problem in facts.problems)
    assert "0000:61:00.0: an NVIDIA device on the bus" in told
    assert "0000:9d:00.0/information: does not describe the device" in told


def test_without_a_driver_cards_are_known_by_the_bus(tmp_path: Path) -> None:
    root = grow("h100-8", tmp_path)
    shutil.rmtree(root / "proc")
    facts = probe(root)
    assert facts.model == "H100" and len(facts.devices) == 8 and facts.partitions == ()
    assert sum("but the nvidia driver is not loaded" in problem.problem for problem in facts.problems) == 8


def test_the_name_decides_only_where_there_is_no_id(tmp_path: Path) -> None:
    root = grow("h100-8", tmp_path)
    shutil.rmtree(root / "sys")
    assert probe(root).devices[0].model == "H100"
