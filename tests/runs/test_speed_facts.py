"""What a run records about its machine is read as the facts that can change its speed."""

from __future__ import annotations

import pytest
from msgspec import structs

from fakes.nodes import node
from primus.machine.facts import MachineFacts, Software
from primus.runs.snapshot import SystemInfo
from primus.runs.speed_facts import describe_software

SYSTEM = SystemInfo(
    host="node-17", kernel="6.8", architecture="x86_64", python="3.12", cpu_model="EPYC", cpu_cores=96, memory_bytes=1
)
ALWAYS = {"CPU": "EPYC", "CPU cores": "96", "kernel": "6.8", "Python": "3.12"}


def describe(facts: MachineFacts, *command: str) -> dict[str, str]:
    found = describe_software(structs.replace(SYSTEM, facts=facts), command)
    return {name: value for name, value in found.items() if name not in ALWAYS}


def test_a_run_of_an_earlier_version_has_the_facts_of_its_host() -> None:
    assert describe_software(SYSTEM, ()) == ALWAYS


def test_firmware_that_differs_between_devices_is_named_with_each_version() -> None:
    first, second = node(2).devices
    devices = (
        structs.replace(first, firmware={"vbios": "113-B", "smc": "85"}),
        structs.replace(second, firmware={"vbios": "113-A", "smc": "85"}),
    )
    assert describe(MachineFacts(devices=devices)) == {"firmware vbios": "113-A, 113-B", "firmware smc": "85"}


@pytest.mark.parametrize(
    ("software", "expected"),
    [
        (Software(amd_driver="6.12", rocm="7.0"), {"driver": "6.12", "ROCm": "7.0"}),
        (Software(nvidia_driver="580.1", cuda="13.0"), {"driver": "580.1", "CUDA": "13.0"}),
    ],
)
def test_driver_and_library_are_those_of_the_vendor(software: Software, expected: dict[str, str]) -> None:
    assert describe(MachineFacts(software=software)) == expected


@pytest.mark.parametrize("words", [("--image", "rocm:7"), ("--image=rocm:7",), ()])
def test_the_image_of_the_command_line_precedes_the_container_that_the_machine_shows(words: tuple[str, ...]) -> None:
    facts = MachineFacts(container="docker")
    assert describe(facts, "container", *words, "--") == {"container": "rocm:7" if words else "docker"}
