"""Live values of NVIDIA GPUs from nvidia-smi; the kernel's files have none.

Fields: `nvidia-smi --help-query-gpu`, `--help-query-remapped-rows`; reasons for a low clock: nvml.h,
nvmlClocksEventReasons.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

from msgspec import Struct, structs

from primus import process
from primus.machine import pci
from primus.machine.facts import Device
from primus.machine.nvidia.devices import LIBRARY
from primus.machine.tools import smi
from primus.machine.tools.smi import parse_integer, parse_number, parse_size
from primus.machine.tools.vitals import (
    BANKS,
    Process,
    RowRemapping,
    ToolCall,
    Vitals,
    index_by_address,
    parse_answer,
    parse_percent,
)
from primus.machine.tree import FileTree

TOOL = "nvidia-smi"
GPU_FIELDS = (
    "pci.bus_id",
    "temperature.gpu",
    "temperature.memory",
    "power.draw",
    "power.limit",
    "memory.total",
    "memory.used",
    "utilization.gpu",
    "ecc.errors.corrected.volatile.total",
    "ecc.errors.uncorrected.volatile.total",
    "ecc.errors.uncorrected.aggregate.sram.thresholdExceeded",
    "gpu_recovery_action",
    "clocks_event_reasons.active",
    "clocks.sm",
    "clocks.max.sm",
    "clocks.mem",
)
ROW_FIELDS = (
    "gpu_bus_id",
    "remapped_rows.correctable",
    "remapped_rows.uncorrectable",
    "remapped_rows.pending",
    "remapped_rows.failure",
    *(f"remapped_rows.histogram.{level}" for level in BANKS),
)
APP_FIELDS = ("gpu_bus_id", "pid", "used_memory", "process_name")
QUERIES = {"--query-gpu": GPU_FIELDS, "--query-remapped-rows": ROW_FIELDS, "--query-compute-apps": APP_FIELDS}
OLDER_NAMES = {"clocks_event_reasons.active": "clocks_throttle_reasons.active"}
"""Names of fields before driver 535 (nvidia-smi, release notes)."""
REFUSED = re.compile(r'Field "([^"]+)" is not a valid field')
"""nvidia-smi rejects a query that contains one unknown field (newer than the driver, or renamed)."""
REASONS = {
    0x04: "sw_power_cap",
    0x08: "hw_slowdown",
    0x20: "sw_thermal_slowdown",
    0x40: "hw_thermal_slowdown",
    0x80: "hw_power_brake_slowdown",
}
"""Reasons that slow down a busy device; idle and application clock settings are not faults."""

Rows = list[dict[str, str]]


class NvidiaSmiAnswer(Struct, frozen=True):
    """Answer to one query."""

    text: str
    fields: tuple[str, ...]
    """The columns, by the names of `QUERIES`: without those that this version does not support."""
    call: ToolCall | None
    """None if the tool is not installed."""


def read_kernel_vitals(tree: FileTree, gpus: Sequence[Device]) -> dict[int, Vitals]:
    """No values: the driver exposes live values only through its library."""
    return {}


def read_tool_vitals(
    gpus: Sequence[Device], environ: Mapping[str, str], timeout_s: float
) -> Iterator[tuple[str, dict[int, Vitals], list[ToolCall]]]:
    """Values of each GPU from nvidia-smi."""
    with ThreadPoolExecutor(len(QUERIES)) as pool:
        answers = list(pool.map(lambda query: ask_query(query, environ, timeout_s), QUERIES.items()))
    calls = [answer.call for answer in answers if answer.call]
    yield TOOL, ask_nvidia_smi(answers, gpus, calls), calls


def read_library_vitals(tree: FileTree, gpus: Sequence[Device], library: str = LIBRARY) -> dict[int, Vitals]:
    """Values of each GPU from NVML, for machines where nvidia-smi is not installed or does not respond."""
    from primus.machine.nvidia import nvml  # only on machines with NVIDIA GPUs

    addresses = index_by_address(gpus)
    found = nvml.read_nvml_vitals(tree, library).items()
    return {index: _name_processes(tree, values) for bdf, values in found if (index := addresses.get(bdf)) is not None}


def _name_processes(tree: FileTree, values: Vitals) -> Vitals:
    """The values with process names, which NVML does not report."""
    named = (
        structs.replace(each, name=tree.read_text(f"proc/{each.pid}/comm") or "") for each in values.processes or ()
    )
    return values if values.processes is None else structs.replace(values, processes=tuple(named))


def ask_query(query: tuple[str, Sequence[str]], environ: Mapping[str, str], timeout_s: float) -> NvidiaSmiAnswer:
    """The answer to one query of `QUERIES`; an unknown field is retried by its older name, or skipped, until the
    time limit."""
    flag, fields = query
    asked = {field: field for field in fields}
    deadline = time.monotonic() + timeout_s
    # Each pass renames or removes one field, so the loop ends after at most two passes for each field; all passes
    # share one deadline.
    while True:
        left_s = max(0.1, deadline - time.monotonic())
        answer = process.run_command([TOOL, f"{flag}={','.join(asked.values())}", "--format=csv"], environ, left_s)
        refused = REFUSED.search(answer.text) or REFUSED.search(answer.problem)
        unknown = next((field for field, name in asked.items() if refused and name == refused[1]), None)
        if unknown is None or len(asked) == 1:
            break
        older = OLDER_NAMES.get(unknown)
        if older and asked[unknown] != older:
            asked[unknown] = older
        else:
            del asked[unknown]
    # A later pass has less than the whole limit: if it is killed, the call counts as one that took the whole limit.
    seconds = timeout_s if answer.state == "slow" else round(answer.duration_s, 3)
    call = ToolCall(tool=f"{TOOL} {flag}", seconds=seconds, problem=answer.problem)
    is_readable = answer.state in ("ok", "failed")
    return NvidiaSmiAnswer(
        answer.text if is_readable else "", tuple(asked), None if answer.state == "missing" else call
    )


def ask_nvidia_smi(
    answers: Sequence[NvidiaSmiAnswer], gpus: Sequence[Device], calls: list[ToolCall]
) -> dict[int, Vitals]:
    """The values of the three tables merged; cells without a value (N/A) are None."""
    devices, rows, apps = (_parse_table(answer, flag, calls) for flag, answer in zip(QUERIES, answers, strict=True))
    addresses = index_by_address(gpus)
    found = {}
    for row in devices:
        bus = pci.normalize_address(row.get("pci.bus_id", ""))
        index = addresses.get(bus or "")
        if index is not None:
            own_rows = next((other for other in rows if pci.normalize_address(other.get("gpu_bus_id", "")) == bus), {})
            own_apps = [app for app in apps if pci.normalize_address(app.get("gpu_bus_id", "")) == bus]
            found[index] = _parse_vitals(row, own_rows, own_apps if answers[2].text.strip() else None)
    return found


def _parse_table(answer: NvidiaSmiAnswer, flag: str, calls: list[ToolCall]) -> Rows:
    nothing: Rows = []
    return parse_answer(
        lambda text: smi.parse_table(text, answer.fields), answer.text, nothing, calls, f"{TOOL} {flag}"
    )


def _parse_vitals(row: Mapping[str, str], rows: Mapping[str, str], apps: Rows | None) -> Vitals:
    return Vitals(
        temperature_c=parse_number(row.get("temperature.gpu")),
        memory_temperature_c=parse_number(row.get("temperature.memory")),
        power_w=parse_number(row.get("power.draw")),
        power_cap_w=parse_number(row.get("power.limit")),
        memory_used_bytes=parse_size(row.get("memory.used")),
        activity_percent=parse_percent(row.get("utilization.gpu")),
        ecc_correctable=parse_integer(row.get("ecc.errors.corrected.volatile.total")),
        ecc_uncorrectable=parse_integer(row.get("ecc.errors.uncorrected.volatile.total")),
        has_exceeded_sram_errors=_parse_flag(row.get("ecc.errors.uncorrected.aggregate.sram.thresholdExceeded")),
        remapping=_parse_remapping(rows),
        recovery_action=_parse_recovery_action(row.get("gpu_recovery_action")),
        shares_host_memory=(_is_absent(row.get("memory.total")) and _is_absent(row.get("memory.used"))) or None,
        throttle=_parse_throttle_reasons(row.get("clocks_event_reasons.active", "")),
        clock_mhz=parse_number(row.get("clocks.sm")),
        max_clock_mhz=parse_number(row.get("clocks.max.sm")),
        memory_clock_mhz=parse_number(row.get("clocks.mem")),
        processes=None if apps is None else tuple(_parse_processes(apps)),
    )


def _parse_remapping(rows: Mapping[str, str]) -> RowRemapping | None:
    levels = {level: parse_integer(rows.get(f"remapped_rows.histogram.{level}")) for level in BANKS}
    found = RowRemapping(
        corrected=parse_integer(rows.get("remapped_rows.correctable")),
        uncorrected=parse_integer(rows.get("remapped_rows.uncorrectable")),
        is_pending=_parse_flag(rows.get("remapped_rows.pending")),
        has_failed=_parse_flag(rows.get("remapped_rows.failure")),
        banks={level: count for level, count in levels.items() if count is not None},
    )
    return None if found == RowRemapping() else found


def _parse_flag(text: str | None) -> bool | None:
    """Yes and No, or a number in some versions."""
    count = parse_integer(text)
    return {"yes": True, "no": False}.get((text or "").lower(), None if count is None else count > 0)


def _is_absent(text: str | None) -> bool:
    """Whether the device does not support the value; a failed device prints ``[Unknown Error]`` or ``[GPU is
    lost]``."""
    return (text or "").strip("[]").lower() in ("n/a", "not supported")


def _parse_recovery_action(text: str | None) -> str | None:
    """``None`` is a value here: no action is needed."""
    return "None" if text == "None" else smi.parse_text(text)


def _parse_throttle_reasons(text: str) -> tuple[str, ...] | None:
    try:
        bits = int(text, 16)
    except ValueError:
        return None
    return tuple(name for bit, name in REASONS.items() if bits & bit)


def _parse_processes(apps: Rows) -> Iterator[Process]:
    for app in apps:
        if app.get("pid", "").isdecimal():
            name, memory = app.get("process_name"), app.get("used_memory")
            yield Process(pid=int(app["pid"]), name=smi.parse_text(name) or "", memory_bytes=parse_size(memory))
