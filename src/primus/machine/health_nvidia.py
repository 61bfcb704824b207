"""Live values of NVIDIA cards by nvidia-smi; the kernel's files have none.

Fields: `nvidia-smi --help-query-gpu`; reasons for a low clock: nvml.h, nvmlClocksEventReasons.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from primus.machine import pci, smi
from primus.machine.facts import Device
from primus.machine.smi import integer, number, size
from primus.machine.tree import Tree
from primus.machine.vitals import Process, ToolCall, Vitals, ask, by_address, percent, understood

GPU_FIELDS = (
    "pci.bus_id",
    "temperature.gpu",
    "temperature.memory",
    "power.draw",
    "power.limit",
    "memory.used",
    "utilization.gpu",
    "ecc.errors.corrected.volatile.total",
    "ecc.errors.uncorrected.volatile.total",
    "clocks_throttle_reasons.active",
    "clocks.sm",
    "clocks.max.sm",
    "clocks.mem",
)
ROW_FIELDS = (
    "gpu_bus_id",
    "remapped_rows.correctable",
    "remapped_rows.uncorrectable",
    "remapped_rows.pending",
)
APP_FIELDS = ("gpu_bus_id", "pid", "used_memory", "process_name")
QUERIES = {"--query-gpu": GPU_FIELDS, "--query-remapped-rows": ROW_FIELDS, "--query-compute-apps": APP_FIELDS}
QUESTIONS = tuple(("nvidia-smi", f"{flag}={','.join(fields)}", "--format=csv") for flag, fields in QUERIES.items())
REASONS = {
    0x04: "sw_power_cap",
    0x08: "hw_slowdown",
    0x20: "sw_thermal_slowdown",
    0x40: "hw_thermal_slowdown",
    0x80: "hw_power_brake_slowdown",
}
"""Those that hold back a busy device; idleness and set clocks are no faults."""

Rows = list[dict[str, str]]


def by_kernel(tree: Tree, cards: Sequence[Device]) -> dict[int, Vitals]:
    """Nothing: the driver shows live values through its library only."""
    return {}


def by_tools(
    cards: Sequence[Device], environ: Mapping[str, str], timeout_s: float
) -> Iterator[tuple[str, dict[int, Vitals], list[ToolCall]]]:
    """What nvidia-smi says of each card."""
    answers, calls = ask(QUESTIONS, environ, timeout_s)
    yield "nvidia-smi", nvidia_smi(answers, cards, calls), calls


def nvidia_smi(answers: Sequence[str], cards: Sequence[Device], calls: list[ToolCall]) -> dict[int, Vitals]:
    """The values of the three tables together; cells that say N/A in some way are None."""
    nothing: Rows = []
    gpus, rows, apps = (
        understood(lambda text, names=fields: smi.table(text, names), answer, nothing, calls, " ".join(argv[:2]))  # type: ignore[misc]
        for fields, argv, answer in zip(QUERIES.values(), QUESTIONS, answers, strict=True)
    )
    addresses = by_address(cards)
    found = {}
    for row in gpus:
        index = addresses.get(pci.address(row["pci.bus_id"]) or "")
        if index is not None:
            bus = pci.address(row["pci.bus_id"])
            own_rows = next((other for other in rows if pci.address(other["gpu_bus_id"]) == bus), {})
            own_apps = [app for app in apps if pci.address(app["gpu_bus_id"]) == bus] if answers[2].strip() else None
            found[index] = _vitals(row, own_rows, own_apps)
    return found


def _vitals(row: dict[str, str], rows: dict[str, str], apps: Rows | None) -> Vitals:
    remapped = [integer(rows.get(f"remapped_rows.{kind}")) for kind in ("correctable", "uncorrectable")]
    return Vitals(
        temperature_c=number(row["temperature.gpu"]),
        memory_temperature_c=number(row["temperature.memory"]),
        power_w=number(row["power.draw"]),
        power_cap_w=number(row["power.limit"]),
        memory_used_bytes=size(row["memory.used"]),
        activity_percent=percent(row["utilization.gpu"]),
        ecc_correctable=integer(row["ecc.errors.corrected.volatile.total"]),
        ecc_uncorrectable=integer(row["ecc.errors.uncorrected.volatile.total"]),
        bad_pages=None if None in remapped else sum(count or 0 for count in remapped),
        pending_pages=_pending(rows.get("remapped_rows.pending")),
        throttle=_reasons(row["clocks_throttle_reasons.active"]),
        clock_mhz=number(row["clocks.sm"]),
        max_clock_mhz=number(row["clocks.max.sm"]),
        memory_clock_mhz=number(row["clocks.mem"]),
        processes=None if apps is None else tuple(_processes(apps)),
    )


def _pending(text: str | None) -> int | None:
    """A number, or Yes and No in older versions."""
    return {"yes": 1, "no": 0}.get((text or "").lower(), integer(text))


def _reasons(text: str) -> tuple[str, ...] | None:
    try:
        bits = int(text, 16)
    except ValueError:
        return None
    return tuple(name for bit, name in REASONS.items() if bits & bit)


def _processes(apps: Rows) -> Iterator[Process]:
    for app in apps:
        if app["pid"].isdecimal():
            yield Process(
                pid=int(app["pid"]), name=smi.text(app["process_name"]) or "", memory_bytes=size(app["used_memory"])
            )
