"""What besides settings can change the speed of a run, by one table: variables, packages, and the machine."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

from msgspec import Struct

from primus.machine.facts import Device
from primus.runs.differences import SHELL, read_variable_dump
from primus.runs.snapshot import SystemInfo
from primus.runs.store import Run

FILE = Path(__file__).with_name("speed_facts.yaml")

SpeedPart = Literal["variable", "package", "machine"]
SpeedKind = Literal["tuned", "same", "minor", "irrelevant"]


class SpeedRule(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What another value of some facts means."""

    kind: SpeedKind
    reason: str
    names: list[str]
    """Whole names, or beginnings that end with `*`."""
    of_engine: bool = False
    """Whether it belongs to the engine, so that another engine has it otherwise."""


class SpeedTable(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The content of `speed_facts.yaml`."""

    variables: list[SpeedRule]
    packages: list[SpeedRule]
    machine: list[SpeedRule]


class RunVariables(Struct, frozen=True, kw_only=True):
    """Variables of a run that can matter: those that the launch set, and of the shell's those in the table."""

    values: dict[str, str]
    """Without empty ones: an empty value keeps a variable unset (primus.machine.environment.precedence)."""
    sources: dict[str, str]
    """What set each of them: a layer of the launch such as `mi300x`, ``--env`` or ``shell``."""


@functools.cache
def read_speed_table() -> SpeedTable:
    """The table of this version."""
    from primus.config.source import read_package_yaml  # imports yaml: not for commands that read none

    return read_package_yaml(FILE, SpeedTable)


@functools.cache
def find_speed_rule(part: SpeedPart, name: str) -> SpeedRule | None:
    """The rule of a variable, package or fact about the machine; None if the table does not have it."""
    table = read_speed_table()
    rules = {"variable": table.variables, "package": table.packages, "machine": table.machine}[part]
    text = name.lower() if part == "package" else name
    return next((rule for rule in rules if any(_matches(text, pattern) for pattern in rule.names)), None)


def _matches(name: str, pattern: str) -> bool:
    return name.startswith(pattern[:-1]) if pattern.endswith("*") else name == pattern


def read_run_variables(run: Run) -> RunVariables:
    """The variables in the run folder."""
    values, sources = {}, {}
    for name, (value, source) in read_variable_dump(run).items():
        if value and (source != SHELL or find_speed_rule("variable", name)):
            values[name], sources[name] = value, source
    return RunVariables(values=values, sources=sources)


def describe_software(system: SystemInfo, command: Sequence[str]) -> dict[str, str]:
    """Facts about a machine that can change the speed, by their names in the table; those that are known.

    Args:
        system: As the run recorded it.
        command: Command line of the run, which may name the image of its container.
    """
    facts: dict[str, object] = {
        "CPU": system.cpu_model, "CPU cores": system.cpu_cores, "kernel": system.kernel, "Python": system.python,
    }  # fmt: skip
    if system.facts:
        software = system.facts.software
        facts |= {
            "driver": software.amd_driver or software.nvidia_driver,
            "ROCm": software.rocm,
            "CUDA": software.cuda,
            "container": find_image(command) or system.facts.container,
            **_list_firmware(system.facts.devices),
        }
    return {name: str(value) for name, value in facts.items() if value}


def _list_firmware(devices: Sequence[Device]) -> dict[str, str]:
    """Versions of the firmware of the devices, as `firmware vbios`; several, where the devices differ."""
    found: dict[str, set[str]] = {}
    for device in devices:
        for name, version in device.firmware.items():
            found.setdefault(f"firmware {name}", set()).add(version)
    return {name: ", ".join(sorted(versions)) for name, versions in found.items()}


def find_image(command: Sequence[str]) -> str | None:
    """The container image that a command line names."""
    for index, word in enumerate(command):
        if word == "--image" and index + 1 < len(command):
            return command[index + 1]
        if word.startswith("--image="):
            return word.partition("=")[2]
    return None


def filter_packages(packages: Mapping[str, str]) -> dict[str, str]:
    """The packages that can change the speed."""
    return {name.lower(): version for name, version in packages.items() if find_speed_rule("package", name)}
