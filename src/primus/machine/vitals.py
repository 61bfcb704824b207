"""Live values of a card, and how tools are asked for them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from msgspec import Struct, structs

from primus.machine.facts import Device
from primus.machine.smi import NOT_UNDERSTOOD, parse_number
from primus.process import run_command

Parsed = TypeVar("Parsed")


class Process(Struct, frozen=True, kw_only=True):
    """A process that holds a device, though it may hold no memory."""

    pid: int
    name: str = ""
    memory_bytes: int | None = None


BANKS = ("max", "high", "partial", "low", "none")
"""How many spare rows a bank of memory has left (NVML, nvmlRowRemapperHistogramValues_t)."""


class RowRemapping(Struct, frozen=True, kw_only=True):
    """How a card has replaced failed rows of its memory by spare ones; None where it does not say.

    NVIDIA GPU Memory Error Management: a replaced row is a repair. The failure flag calls for a new card, the pending
    flag for a reset, and few spare rows left in a bank announce a failure.
    """

    corrected: int | None = None
    """Rows replaced for errors that could be corrected."""
    uncorrected: int | None = None
    is_pending: bool | None = None
    """Whether a row is replaced at the next reset; until then it is not used."""
    has_failed: bool | None = None
    """Whether a row could not be replaced: the flag by which cards are returned."""
    banks: dict[str, int] = {}
    """Number of memory banks by the spare rows that they have left, by the words of `BANKS`."""


class Vitals(Struct, frozen=True, kw_only=True):
    """Live values of a card; None where no source states one."""

    temperature_c: float | None = None
    """The hottest spot of the die."""
    memory_temperature_c: float | None = None
    power_w: float | None = None
    power_cap_w: float | None = None
    memory_used_bytes: int | None = None
    activity_percent: float | None = None
    ecc_correctable: int | None = None
    """Errors since the driver was loaded."""
    ecc_uncorrectable: int | None = None
    bad_pages: int | None = None
    """Pages of memory that are no longer used."""
    pending_pages: int | None = None
    """Those that will be taken out of use."""
    unreservable_pages: int | None = None
    """Those that cannot be taken out of use."""
    bad_page_threshold: int | None = None
    """Bad pages from which on the driver calls for a new card."""
    has_exceeded_bad_pages: bool | None = None
    """Whether the card's tool says that the threshold is exceeded."""
    remapping: RowRemapping | None = None
    has_exceeded_sram_errors: bool | None = None
    """Whether so many errors of on-chip memory were found that the card is to be returned."""
    recovery_action: str | None = None
    """What the driver wants done before the card is used again: `None`, `Reset`, `Reboot`, `Drain P2P` ..."""
    shares_host_memory: bool | None = None
    """Whether the device has no memory of its own, so that none can be in use."""
    throttle: tuple[str, ...] | None = None
    """Why the clock is held down now; empty where it is not."""
    pcie_replays: int | None = None
    clock_mhz: float | None = None
    max_clock_mhz: float | None = None
    memory_clock_mhz: float | None = None
    processes: tuple[Process, ...] | None = None


class ToolCall(Struct, frozen=True, kw_only=True):
    """A tool that was asked."""

    tool: str
    """With its first argument: ``amd-smi metric``."""
    seconds: float
    problem: str = ""
    """Why its answer is of no use; empty where it is."""


def ask_tools(
    questions: Sequence[Sequence[str]], environ: Mapping[str, str], timeout_s: float
) -> tuple[list[str], list[ToolCall]]:
    """The answers to questions that are asked side by side, empty where there is none; and the calls of the tools that
    are installed."""
    with ThreadPoolExecutor(len(questions)) as pool:
        answers = list(pool.map(lambda argv: run_command(argv, environ, timeout_s), questions))
    calls = [
        ToolCall(tool=" ".join(argv[:2]), seconds=round(answer.duration_s, 3), problem=answer.problem)
        for argv, answer in zip(questions, answers, strict=True)
        if answer.state != "missing"
    ]
    return [answer.text if answer.state in ("ok", "failed") else "" for answer in answers], calls


def parse_answer(
    parse: Callable[[str], Parsed], text: str, nothing: Parsed, calls: list[ToolCall], tool: str
) -> Parsed:
    """What `text` means; where it means nothing, `nothing`, and the call of `tool` gets a problem."""
    if not text.strip():
        return nothing
    try:
        return parse(text)
    except NOT_UNDERSTOOD as error:
        problem = f"its output cannot be understood: {error}"[:200]
        calls[:] = [
            structs.replace(made, problem=made.problem or problem) if made.tool == tool else made for made in calls
        ]
        return nothing


def parse_percent(value: Any) -> float | None:
    """A share that can be one: rocm-smi prints a raw counter under the same name (``GFX Activity: 50288``)."""
    found = parse_number(value)
    return found if found is not None and 0 <= found <= 100 else None


def index_by_address(cards: Sequence[Device]) -> dict[str, int]:
    """Index of each card by its address, and by those of its partitions."""
    parts = {part.bdf: card.index for card in cards for part in card.partitions if part.bdf}
    return parts | {card.bdf: card.index for card in cards if card.bdf}
