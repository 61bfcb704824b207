"""Readings are judged by the rows of the table, and every row can be used."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from msgspec import structs

import primus.preflight
from primus.machine.health import DeviceHealth
from primus.preflight.findings.rules import COMPARISONS, About, judge, judge_readings, load_rules
from primus.preflight.findings.thresholds import Thresholds

GIB = 1 << 30


def test_every_row_is_used_by_a_check() -> None:
    folder = Path(primus.preflight.__file__).parent
    nodes = (node for file in folder.rglob("*.py") for node in ast.walk(ast.parse(file.read_text())))
    texts = {node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    shared = {key.partition("/")[0] for key in load_rules() if "/" in key}
    generated = {"gpu.ecc_correctable", "gpu.pcie_replays", "performance.sanity"}
    unused = {key for key in load_rules() if key not in texts and f"/{key.partition('/')[2]}" not in texts}
    assert unused - shared - generated == {
        "performance.rdma_bandwidth/doubtful",  # named by the list that its members are in
        "performance.rdma_bandwidth/cleared",
    }


def test_every_limit_is_a_threshold_or_a_text() -> None:
    for key, rule in load_rules().items():
        if rule.limit:
            sign, name, *_ = rule.limit.split()
            assert (name in Thresholds.__struct_fields__) == (sign in COMPARISONS), key


@pytest.mark.parametrize(
    ("row", "reading", "status"),
    [
        ("gpu.temperature", 99.5, "ok"),
        ("gpu.temperature", 100.0, "fail"),
        ("gpu.ecc_correctable", 10_000, "ok"),
        ("gpu.ecc_correctable", 10_001, "warn"),
        ("storage.inodes", 10_000, "ok"),
        ("storage.inodes", 9_999, "warn"),
        ("gpu.memory_used", 2 * GIB - 1, "ok"),
        ("gpu.memory_used", 2 * GIB, "fail"),
        ("gpu.recovery_action", "None", "ok"),
        ("gpu.recovery_action", "Reboot", "fail"),
    ],
)
def test_a_reading_at_its_limit_is_judged_by_the_operator(row: str, reading: object, status: str) -> None:
    found = judge(row, reading, limits=Thresholds(), worst=0)
    assert found.status == status
    assert bool(found.advice) == (status != "ok")


def test_a_finding_states_reading_limit_source_and_place() -> None:
    limits = structs.replace(Thresholds(), temperature_c=80.0)
    found = judge("gpu.temperature", 81.5, "", About("GPU 2", "node-7"), limits=limits)
    assert (found.measured, found.expected, found.value) == ("81.5 C", "< 80 C", 81.5)
    assert found.reason == "hotspot; hotter GPUs throttle (AMD-AGI/Primus-SaFE node monitors)"
    assert (found.check, found.subject, found.host) == ("gpu.temperature", "GPU 2", "node-7")


def test_a_size_is_compared_in_gib_and_shown_with_its_unit() -> None:
    found = judge("storage.free", 20 * GIB, limits=Thresholds())
    assert (found.status, found.measured, found.expected, found.value) == ("ok", "20.0 GiB", ">= 10 GiB", 20 * GIB)


def test_a_row_may_say_what_is_measured_if_the_reading_is_not_good() -> None:
    found = [judge("gpu.sram_errors", has_exceeded).measured for has_exceeded in (False, True)]
    assert found == ["below the threshold", "threshold exceeded"]


def test_a_caller_may_round_the_number_that_nodes_compare() -> None:
    found = judge("host.memory", 9.98, "10.0 %", limits=Thresholds(), value=10.0)
    assert (found.status, found.value, found.measured) == ("warn", 10.0, "10.0 %")


def test_a_case_has_the_fields_of_its_check_and_its_own() -> None:
    usual, settled = load_rules()["gpu.ecc_uncorrectable"], load_rules()["gpu.ecc_uncorrectable/settled"]
    assert (settled.limit, settled.advice) == (usual.limit, usual.advice)
    assert (usual.status, settled.status) == ("fail", "warn")
    assert judge("gpu.ecc_uncorrectable/settled", 3).check == "gpu.ecc_uncorrectable"


def test_a_caller_names_the_check_the_status_and_the_value_of_a_shared_row() -> None:
    found = judge(
        "expect/version", False, "6.1", check="software.expect_kernel", wanted="6.2", status="warn", value=1.0
    )
    assert (found.check, found.status, found.value) == ("software.expect_kernel", "warn", 1.0)


def test_readings_that_a_device_does_not_report_have_no_finding() -> None:
    device = DeviceHealth(index=0, temperature_c=101.0)
    found = list(judge_readings(device, ("gpu.activity", "gpu.temperature"), About("GPU 0"), limits=Thresholds()))
    assert [finding.check for finding in found] == ["gpu.temperature"]
