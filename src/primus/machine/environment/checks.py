"""Contradictions among the variables of a node: refused where a run would fail or not repeat itself, else a warning."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from ipaddress import ip_address

from primus.errors import UsageError
from primus.machine.environment.hipblaslt import HIPBLASLT_VARIABLE, RUNTIME_CACHE, RUNTIME_MODES, RUNTIME_TUNING
from primus.machine.environment.variable_choice import AMD_ONLY, DETERMINISTIC, VariableChoice
from primus.machine.facts import MachineFacts
from primus.machine.network.selection import SOCKET_VARIABLES
from primus.machine.tree import parse_int

USER_LAYERS = ("experiment", "user", "--env")
"""Layers that hold the user's values; their conflicts with other layers are reported."""
NCCL_DEBUG_LEVELS = ("VERSION", "WARN", "INFO", "TRACE")
NCCL_IB_TIMEOUTS = range(1, 23)
"""NCCL user guide, environment variables."""


def check_determinism(chosen: Mapping[str, VariableChoice]) -> None:
    """Raise UsageError if a value that the user set contradicts deterministic mode."""
    for name, choice in chosen.items():
        wanted = next((lost for lost in choice.overrode if lost.layer == "deterministic"), None)
        if wanted and wanted.value != choice.value:
            raise UsageError(
                f"{DETERMINISTIC} needs {name}={wanted.value}: {choice.layer} ({choice.source}) has {choice.value!r}",
                f"unset {name}, or unset {DETERMINISTIC}",
            )


def check_interfaces(chosen: Mapping[str, VariableChoice]) -> None:
    """Raise UsageError for an address instead of an interface's name: Gloo fails everywhere (AMD-AGI/Primus#1063)."""
    for name in SOCKET_VARIABLES:
        choice = chosen.get(name)
        entries = (choice.value or "").lstrip("^=").split(",") if choice else []
        address = next(filter(_is_address, entries), None)
        if choice and address:
            assert choice.layer != "network", "an interface has a name"
            raise UsageError(
                f"{name}={choice.value} ({choice.layer}, {choice.source}): {address} is an IP address",
                "use the name of an interface, such as eth0",
            )


def _is_address(text: str) -> bool:
    try:
        ip_address(text.strip())
    except ValueError:
        return False
    return True


def find_conflicts(chosen: Mapping[str, VariableChoice]) -> Iterator[str]:
    """Values of the user that keep primus from setting what it recommends."""
    for name, choice in chosen.items():
        lost = next((lost for lost in choice.overrode if lost.layer not in USER_LAYERS), None)
        if lost and lost.value != choice.value and choice.layer in USER_LAYERS:
            wanted = "unset" if lost.value is None else lost.value
            yield f"{name}: keeping the value of {choice.layer}; {lost.layer} recommends {wanted}: {lost.reason}"


def find_dubious_values(chosen: Mapping[str, VariableChoice], facts: MachineFacts) -> Iterator[str]:
    """Common values that the libraries do not document, and AMD variables on NVIDIA machines."""
    strays = [name for name in chosen if name.startswith(AMD_ONLY)]
    if strays and any(device.vendor == "nvidia" for device in facts.devices):
        yield f"{', '.join(strays)}: for AMD devices only, no effect on this machine"
    debug, timeout = (chosen[name].value if name in chosen else None for name in ("NCCL_DEBUG", "NCCL_IB_TIMEOUT"))
    if debug and debug.upper() not in NCCL_DEBUG_LEVELS:
        yield f"NCCL_DEBUG={debug}: valid values are {', '.join(NCCL_DEBUG_LEVELS)}"
    if timeout and parse_int(timeout) not in NCCL_IB_TIMEOUTS:
        yield f"NCCL_IB_TIMEOUT={timeout}: valid values are 1 to 22 (exponent of two)"
    if "RCCL_DEBUG" in chosen:
        yield "RCCL does not read RCCL_DEBUG; set NCCL_DEBUG"


def find_runtime_tuning_problems(chosen: Mapping[str, VariableChoice], num_processes: int) -> Iterator[str]:
    """Settings of hipBLASLt's runtime tuning that do not do what their names say (hipBLASLt documentation)."""
    values = {name: chosen[name].value or "" if name in chosen else "" for name in (RUNTIME_TUNING, RUNTIME_CACHE)}
    mode = values[RUNTIME_TUNING]
    if mode in ("", "off"):
        return
    shown = f"{RUNTIME_TUNING}={mode}"
    if mode not in RUNTIME_MODES:
        yield f"{shown}: valid values are {', '.join(RUNTIME_MODES)}"
        return
    if not values[RUNTIME_CACHE]:
        yield f"{shown} has no effect without {RUNTIME_CACHE}"
    elif mode == "tune" and num_processes > 1:
        yield f"{shown}: {num_processes} processes write one file; tune with one process, then use the mode cache"
    if HIPBLASLT_VARIABLE in chosen and chosen[HIPBLASLT_VARIABLE].value:
        yield f"{shown}: hipBLASLt ignores {HIPBLASLT_VARIABLE}"
