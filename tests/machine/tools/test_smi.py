"""Tools' outputs are read in all shapes that were seen; the samples are genuine, some shortened.

Sources: ROCm/device-metrics-exporter tests, amd-smi 26.2 captures in public tests, ROCm/rocm_smi_lib#159.
"""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from primus.machine import profile
from primus.machine.tools import smi

MI210 = """{"gpu_data":[{"gpu":0,"asic":{"market_name":"AMD Instinct MI210","vendor_id":"0x1002","device_id":"0x740f",
"oam_id":"N/A","num_compute_units":104,"target_graphics_version":"gfx90a"},"bus":{"max_pcie_width":16},
"limit":{"max_power":{"value":300,"unit":"W"},"socket_power":{"value":300,"unit":"W"}},
"driver":{"name":"amdgpu","version":"Linuxversion6.14.0-24-generic(..."},"numa":{"node":1,"affinity":1},
"vram":{"type":"HBM","size":{"value":65520,"unit":"MB"},"max_bandwidth":{"value":"N/A","unit":"GB/s"}}}]}"""
MI355X_FLAT = """[{"gpu":0,"bus":{"bdf":"0000:05:00.0"},"asic":{"market_name":"AMD Instinct MI355X"},
"driver":{"version":"6.16.6"},"limit":{"socket_power":{"value":1400,"unit":"W"},"max_power":{"value":1400,"unit":"W"}}}]"""
MI355X_PPT = """{"gpu_data":[{"gpu":0,"limit":{"ppt0":{"socket_power_limit":{"value":1400,"unit":"W"},
"max_power_limit":{"value":1400,"unit":"W"}},"ppt1":{"socket_power_limit":"N/A","max_power_limit":"N/A"}}}]}"""
MI355X_LIST = """[{"gpu":0,"bdf":"0000:05:00.0","uuid":"75ff75a3-0000-1000-80e3-fd74aab3f72c","partition_id":0}]"""
MI250X_JSON = """{"card0":{"Card Series":"AMD INSTINCT MI200 (MCM) OAM LC MBA HPE C2","Card Model":"0x7408",
"Card Vendor":"Advanced Micro Devices, Inc. [AMD/ATI]","Card SKU":"D65201","Node ID":"7","GFX Version":"gfx9010"}}"""
MI300X_TEXT = """
GPU[0]\t\t: Card series: \t\tAMD Instinct MI300X OAM
GPU[0]\t\t: Card model: \t\t0x74a1
GPU[0]\t\t: Card SKU: \t\tMI3SRIOV
GPU[0]\t\t: PCI Bus: 0000:26:00.0
GPU[0]\t\t: Max Graphics Package Power (W): 750.0
GPU[0]\t\t: GFX Activity: 50288
GPU[0]\t\t: get_overdrive_level_sclk, Not supported on the given system
0       [0x74a1 : 0x00]       35.0°C      133.0W    NPS1, SPX       131Mhz  900Mhz  0%   auto  750.0W    0%   0%
"""
ROCMINFO = """
*******
Agent 1
*******
  Name:                    AMD EPYC 9654 96-Core Processor
  Device Type:             CPU
*******
Agent 2
*******
  Name:                    gfx942
  Marketing Name:          AMD Instinct MI300X
  Device Type:             GPU
  Chip ID:                 29857(0x74a1)
  Max Clock Freq. (MHz):   2100
  BDFID:                   50688
  Compute Unit:            304
  Pool Info:
    Pool 1
      Segment:                 GLOBAL; FLAGS: COARSE GRAINED
      Size:                    201310208(0xbffc000) KB
  ISA Info:
    ISA 1
      Name:                    amdgcn-amd-amdhsa--gfx942:sramecc+:xnack-
"""


def test_amd_smi_of_an_mi210() -> None:
    reading = smi.parse_amd_smi([MI210, ""])[0]
    assert (reading.name, reading.device_id, reading.architecture) == ("AMD Instinct MI210", 0x740F, "gfx90a")
    assert (reading.memory_bytes, reading.power_w, reading.numa_node) == (65520 << 20, 300, 1)
    assert reading.driver is None  # it is the kernel's description
    assert reading.bdf is None


@pytest.mark.parametrize("static", [MI355X_FLAT, MI355X_PPT, "WARNING: not in the render group\n" + MI355X_PPT])
def test_amd_smi_of_an_mi355x_in_both_shapes(static: str) -> None:
    reading = smi.parse_amd_smi([static, MI355X_LIST])[0]
    assert (reading.bdf, reading.device_id, reading.power_w) == ("0000:05:00.0", 0x75A3, 1400)


def test_the_power_limit_is_the_one_that_holds_not_the_largest_possible() -> None:
    capped = '{"ppt0": {"socket_power_limit": {"value": 1000, "unit": "W"}, "max_power_limit": {"value": 1400}}}'
    for limit in (capped, '{"socket_power": {"value": 1000, "unit": "W"}, "max_power": {"value": 1400, "unit": "W"}}'):
        assert smi.parse_amd_smi([f'[{{"gpu": 0, "limit": {limit}}}]', ""])[0].power_w == 1000
    assert (
        smi.parse_amd_smi(['[{"gpu": 0, "limit": {"max_power": {"value": 1400, "unit": "W"}}}]', ""])[0].power_w is None
    )


def test_amd_smi_list_alone_is_enough() -> None:
    assert smi.parse_amd_smi(["", MI355X_LIST])[0].device_id == 0x75A3


def test_rocm_smi_gives_the_model_by_id_in_both_forms() -> None:
    card = smi.parse_rocm_smi([MI250X_JSON])[0]
    assert (card.device_id, card.architecture) == (0x7408, "gfx90a")
    known = profile.find_profile_by_id("amd", card.device_id or 0)
    assert known and known.model == "MI250X"
    card = smi.parse_rocm_smi([MI300X_TEXT])[0]
    assert (card.name, card.device_id, card.bdf) == ("AMD Instinct MI300X OAM", 0x74A1, "0000:26:00.0")
    assert card.power_w == 750
    lower = MI250X_JSON.replace("Card Series", "Card series").replace("Card Model", "Card model")
    assert smi.parse_rocm_smi([lower])[0].device_id == 0x7408


def test_the_card_model_of_an_older_rocm_smi_is_no_device_id() -> None:
    old = '{"card0": {"Card series": "Instinct MI210", "Card model": "0x0c34", "Card SKU": "D67301"}}'
    assert [reading.device_id for reading in smi.parse_rocm_smi([old])] == [None]
    new = '{"card0": {"Card Series": "Instinct MI210", "Card Model": "0x0c34", "Device ID": "0x740f"}}'
    assert [reading.device_id for reading in smi.parse_rocm_smi([new])] == [0x740F]


def test_rocminfo_gives_the_agents_that_are_gpus() -> None:
    (reading,) = smi.parse_rocminfo([ROCMINFO])
    assert (reading.bdf, reading.device_id, reading.architecture) == ("0000:c6:00.0", 29857, "gfx942")
    assert (reading.name, reading.memory_bytes) == ("AMD Instinct MI300X", 196592 << 20)


def test_nvidia_smi_with_units_without_and_without_values() -> None:
    header = "index, name, pci.bus_id, memory.total [MiB], driver_version\n"
    with_units = header + "0, NVIDIA L40S, 00000000:03:00.0, 46068 MiB, 580.178.04\n"
    reading = smi.parse_nvidia_smi([with_units])[0]
    assert (reading.bdf, reading.memory_bytes, reading.driver) == ("0000:03:00.0", 46068 << 20, "580.178.04")
    plain = smi.parse_nvidia_smi(["0, NVIDIA H100 80GB HBM3, 00000000:03:00.0, 81559, 580.65.06\n"])[0]
    assert plain.memory_bytes == 81559 << 20
    empty = smi.parse_nvidia_smi([header + "0, [N/A], 00000000:03:00.0, [N/A], [Not Supported]\n"])[0]
    assert (empty.name, empty.memory_bytes, empty.driver) == (None, None, None)


def test_a_failed_card_costs_its_own_row_only() -> None:
    failed = "[Unknown Error], [GPU requires reset], 00000000:03:00.0, [GPU is lost], 580.65.06\n"
    found = smi.parse_nvidia_smi([f"{failed}1, NVIDIA H100 80GB HBM3, 00000000:43:00.0, 81559 MiB, 580.65.06\n"])
    assert [(one.index, one.name, one.bdf) for one in found] == [
        (0, None, "0000:03:00.0"),
        (1, "NVIDIA H100 80GB HBM3", "0000:43:00.0"),
    ]
    assert found[0].memory_bytes is None


def test_torch_gives_addresses_where_it_has_them() -> None:
    entry = {"name": "AMD Instinct MI300X", "memory": 206141652992, "arch": "gfx942:sramecc+:xnack-", "pci": [0, 5, 0]}
    reading = smi.parse_torch([json.dumps([entry, entry | {"pci": [None, None, None]}])])
    assert (reading[0].bdf, reading[0].architecture, reading[1].bdf) == ("0000:05:00.0", "gfx942", None)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ({"value": 283, "unit": "MB"}, 283 << 20),
        ({"value": 2, "unit": "GB"}, 2 << 30),
        ({"value": 0, "unit": "B"}, 0),
        ({"value": "N/A", "unit": "MB"}, None),
        ("N/A", None),
        ("46068 MiB", 46068 << 20),
        (65520, 65520 << 20),
        (None, None),
    ],
)
def test_sizes_have_many_spellings(value: object, expected: int | None) -> None:
    assert smi.parse_size(value) == expected


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("gfx9010", "gfx90a"),
        ("gfx942:sramecc+:xnack-", "gfx942"),
        ("gfx1100", "gfx1100"),
        ("AMD EPYC", None),
        (None, None),
    ],
)
def test_an_architecture_has_one_spelling(name: str | None, expected: str | None) -> None:
    assert smi.parse_architecture(name) == expected


@given(said=st.text() | st.from_regex(r"\[\{\"gpu\":.*\}\]|GPU\[\d+\]\s*: .*:.*|Agent 1\n .*: .*"))
def test_any_output_is_read_or_refused(said: str) -> None:
    for source in (source for sources in smi.SOURCES.values() for source in sources):
        try:
            readings = source.parse([said] * len(source.questions))
        except smi.NOT_UNDERSTOOD:
            continue
        assert json.dumps([repr(reading) for reading in readings])


PRETTY = json.dumps(json.loads(MI355X_LIST), indent=4)
AROUND = {
    "a warning before": f"WARNING: User is missing the following required groups: render\n{PRETTY}",
    "a warning in brackets before": f"[WARNING] [amdsmi] driver is old {{1}}\n[1] 4242\n{PRETTY}",
    "a prompt on the same line": f"[sudo] password for x: {MI355X_LIST}",
    "words on the same line": f"result: {MI355X_LIST}",
    "words behind": f"{PRETTY}\nWARNING: some values [2] could not be read\n",
    "words behind on the same line": f"{MI355X_LIST} done {{ok}}",
}


@pytest.mark.parametrize("said", AROUND.values(), ids=AROUND)
def test_text_around_json_costs_nothing(said: str) -> None:
    assert smi.find_entries(said)[0]["bdf"] == "0000:05:00.0"


@pytest.mark.parametrize("indent", [None, 4])
@pytest.mark.parametrize("cut", [40, -2])
def test_no_part_of_broken_json_passes_for_the_whole(cut: int, indent: int | None) -> None:
    nested = json.dumps({"gpu_data": json.loads(MI355X_LIST) * 2}, indent=indent)
    with pytest.raises(ValueError):
        smi.find_entries(f"[1]\n{nested[:cut]}")
    cards = json.dumps({f"card{index}": {"Card Series": "x"} for index in range(2)}, indent=indent)
    with pytest.raises(ValueError):
        smi.parse_json(cards[:cut])


@pytest.mark.parametrize("said", ["", "no devices", '{"gpu_data":', '{"system": {}}', "[1, 2]"])
def test_broken_json_is_an_error(said: str) -> None:
    with pytest.raises(ValueError):
        smi.find_entries(said)


def test_a_table_without_rows_has_a_header_or_is_none() -> None:
    fields = ("gpu_bus_id", "pid")
    assert smi.parse_table("gpu_bus_id, pid\n", fields) == [] == smi.parse_table("", fields)
    with pytest.raises(ValueError, match="no table"):
        smi.parse_table("99999\n99999\n", fields)
