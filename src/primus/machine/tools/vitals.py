"""Live values of a GPU, and concurrent calls of the tools that report them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from msgspec import Struct, structs

from primus.machine.facts import Device
from primus.machine.tools.smi import NOT_UNDERSTOOD, parse_number
from primus.process import run_command

Parsed = TypeVar("Parsed")


class Process(Struct, frozen=True, kw_only=True):
    """A process that uses a device, possibly without holding memory."""

    pid: int
    name: str = ""
    memory_bytes: int | None = None


BANKS = ("max", "high", "partial", "low", "none")
"""Levels of spare rows left in a memory bank (NVML, nvmlRowRemapperHistogramValues_t)."""


POWER_LIMITS = frozenset(
    {
        "ppt",
        "gfx_clk_below_host_limit",
        "gfx_clk_below_host_limit_power",
        "total_gfx_clk_below_host_limit",
        "sw_power_cap",
    }
)
"""Reasons for lower clocks that say that a device runs at its power limit, as a full load of a healthy one does (NVIDIA
NVML, clocks event reasons; AMD SMI, violation status)."""
NORMAL_LIMITS = POWER_LIMITS | {"low_utilization", "gpu_idle", "applications_clocks_setting"}
"""Reasons for lower clocks that are no fault: also idling, and clocks that somebody set."""
UNCLEAR_LIMIT = "throttled"
"""Older versions of amd-smi print it for any limit, that of power included, and on some devices always
(ROCm/rocm-systems#11781)."""


class RowRemapping(Struct, frozen=True, kw_only=True):
    """Memory rows that a GPU has remapped to spare rows; None if it does not report a value.

    NVIDIA GPU Memory Error Management: a remapped row is repaired. The failure flag requires replacing the GPU (RMA),
    the pending flag a reset; few spare rows in a bank predict a failure."""

    corrected: int | None = None
    """Rows remapped because of correctable errors."""
    uncorrected: int | None = None
    is_pending: bool | None = None
    """Whether a row is remapped at the next reset; it is not used until then."""
    has_failed: bool | None = None
    """Whether a row could not be remapped, which qualifies the GPU for RMA."""
    banks: dict[str, int] = {}
    """Number of memory banks by level of spare rows left, in the terms of `BANKS`."""


class Vitals(Struct, frozen=True, kw_only=True):
    """Live values of a GPU; None if no source has one."""

    temperature_c: float | None = None
    """The hottest spot of the die."""
    memory_temperature_c: float | None = None
    power_w: float | None = None
    power_cap_w: float | None = None
    energy_j: float | None = None
    """Used since the driver was loaded."""
    memory_used_bytes: int | None = None
    activity_percent: float | None = None
    ecc_correctable: int | None = None
    """Errors since the driver was loaded."""
    ecc_uncorrectable: int | None = None
    bad_pages: int | None = None
    """Retired pages."""
    pending_pages: int | None = None
    """Pages pending retirement."""
    unreservable_pages: int | None = None
    """Pages that cannot be retired."""
    bad_page_threshold: int | None = None
    """Number of bad pages from which the driver requires replacing the GPU."""
    has_exceeded_bad_pages: bool | None = None
    """Whether the tool reports that the threshold is exceeded."""
    remapping: RowRemapping | None = None
    has_exceeded_sram_errors: bool | None = None
    """Whether the SRAM error threshold is exceeded, which qualifies the GPU for RMA."""
    recovery_action: str | None = None
    """Recovery action that the driver requires before the GPU is used again: `None`, `Reset`, `Reboot`, `Drain P2P`
    ..."""
    shares_host_memory: bool | None = None
    """Whether the device uses host memory, so that it reports no separate memory in use."""
    throttle: tuple[str, ...] | None = None
    """Reasons why the clock is throttled now; empty if it is not."""
    pcie_replays: int | None = None
    clock_mhz: float | None = None
    max_clock_mhz: float | None = None
    memory_clock_mhz: float | None = None
    processes: tuple[Process, ...] | None = None


class ToolCall(Struct, frozen=True, kw_only=True):
    """A tool that was called."""

    tool: str
    """Name of the tool with its first argument: ``amd-smi metric``."""
    seconds: float
    problem: str = ""
    """Reason why its output cannot be used; empty if it can."""


def ask_tools(
    questions: Sequence[Sequence[str]], environ: Mapping[str, str], timeout_s: float
) -> tuple[list[str], list[ToolCall]]:
    """Outputs of commands that run concurrently, empty for failed ones; and the calls of the tools that are
    installed."""
    # Each command takes seconds on a node in CPX mode; run_command kills a hung one, so the pool always ends.
    with ThreadPoolExecutor(len(questions)) as pool:
        answers = list(pool.map(lambda argv: run_command(argv, environ, timeout_s), questions))
    # The state `missing` is not a call: the caller then tries the next tool or source.
    calls = [
        ToolCall(tool=" ".join(argv[:2]), seconds=round(answer.duration_s, 3), problem=answer.problem)
        for argv, answer in zip(questions, answers, strict=True)
        if answer.state != "missing"
    ]
    return [answer.text if answer.state in ("ok", "failed") else "" for answer in answers], calls


def parse_answer(
    parse: Callable[[str], Parsed], text: str, nothing: Parsed, calls: list[ToolCall], tool: str
) -> Parsed:
    """The parsed `text`; `nothing`, and a problem on the call of `tool`, if it cannot be parsed."""
    if not text.strip():
        return nothing
    try:
        return parse(text)
    except NOT_UNDERSTOOD as error:
        # The problem is added to the record of the call; an earlier problem is more precise and is kept.
        problem = f"its output cannot be parsed: {error}"[:200]
        calls[:] = [
            structs.replace(made, problem=made.problem or problem) if made.tool == tool else made for made in calls
        ]
        return nothing


def parse_percent(value: Any) -> float | None:
    """A valid percentage: rocm-smi may print a raw counter under the same name (``GFX Activity: 50288``)."""
    found = parse_number(value)
    return found if found is not None and 0 <= found <= 100 else None


def index_by_address(gpus: Sequence[Device]) -> dict[str, int]:
    """Index of each GPU by its address, and by those of its partitions."""
    parts = {part.bdf: gpu.index for gpu in gpus for part in gpu.partitions if part.bdf}
    return parts | {gpu.bdf: gpu.index for gpu in gpus if gpu.bdf}
