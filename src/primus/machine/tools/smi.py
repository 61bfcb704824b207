"""Device values from vendors' tools and torch: later sources, each optional and with a time limit.

Output formats: ROCm/device-metrics-exporter tests (amd-smi), ROCm/rocm_smi_lib#159 (rocm-smi), rocminfo and nvidia-smi
as printed.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from msgspec import Struct

from primus import interpreter
from primus.machine import pci, profile
from primus.machine.facts import MachineProblem, Vendor
from primus.process import run_command

LIMIT_S = 30.0
"""`amd-smi` takes 8 s for the 64 partitions of a node in CPX mode; a first call may load the driver."""
AFTER_SLOW_LIMIT_S = 5.0
"""Limit after one tool timed out: the driver probably hangs."""
MIB = 1 << 20
UNITS = {"B": 1, "KB": 1 << 10, "KIB": 1 << 10, "MB": MIB, "MIB": MIB, "GB": 1 << 30, "GIB": 1 << 30}
"""The tools write MB for MiB."""
NOT_UNDERSTOOD = (ValueError, TypeError, AttributeError, LookupError, RecursionError)
"""Exceptions of parsing output in an unexpected format."""


class ToolReading(Struct, frozen=True, kw_only=True):
    """One GPU as a tool reports it; None if the tool has no value."""

    tool: str
    index: int
    """In the tool's order, which may differ from the driver's."""
    bdf: str | None = None
    name: str | None = None
    device_id: int | None = None
    memory_bytes: int | None = None
    architecture: str | None = None
    power_w: float | None = None
    """Current power limit."""
    driver: str | None = None
    numa_node: int | None = None


class ToolSource(Struct, frozen=True, kw_only=True):
    """A tool, its commands, and the parser of their output."""

    tool: str
    questions: tuple[tuple[str, ...], ...]
    parse: Callable[[Sequence[str]], list[ToolReading]]
    """Parses the outputs, in the order of the commands; the output of a failed command is empty."""


def ask_source(
    source: ToolSource, environ: Mapping[str, str], limit_s: float = LIMIT_S
) -> tuple[list[ToolReading], list[MachineProblem], bool]:
    """Readings of a tool, problems, and whether it timed out; a tool that is not installed gives no readings and no
    problem."""
    # States of a command: ok and failed (both with output), slow (killed at the limit), missing (not installed).
    problems, texts, is_slow = [], [], False
    for question in source.questions:
        answer = run_command(question, environ, limit_s)
        is_slow = is_slow or answer.state == "slow"
        # Output of a failed command is used too: tools fail as a whole if one of many devices does.
        texts.append(answer.text if answer.state in ("ok", "failed") else "")
        if answer.state in ("slow", "failed"):
            problems.append(MachineProblem(source.tool, f"{' '.join(question[:3])}: {answer.problem}"))
        # Further commands of a tool that hangs would each take the full limit.
        if answer.state in ("slow", "missing"):
            break
    texts += [""] * (len(source.questions) - len(texts))
    try:
        return (source.parse(texts) if any(texts) else []), problems, is_slow
    except NOT_UNDERSTOOD as error:
        return [], [*problems, MachineProblem(source.tool, f"its output cannot be parsed: {error}"[:200])], is_slow


def parse_amd_smi(texts: Sequence[str]) -> list[ToolReading]:
    """`amd-smi static --json` and `amd-smi list --json`; the second has addresses that the first may lack."""
    listed = {entry.get("gpu"): entry for entry in find_entries(texts[1])} if texts[1].strip() else {}
    found: list[ToolReading] = []
    for position, entry in enumerate(find_entries(texts[0]) if texts[0].strip() else listed.values()):
        index = entry.get("gpu", position)
        asic, other = find_value(entry, "asic") or {}, listed.get(index, {})
        bdf = find_value(entry, "bus", "bdf") or other.get("bdf")
        found.append(
            ToolReading(
                tool="amd-smi",
                index=index,
                bdf=pci.normalize_address(str(bdf)),
                name=parse_text(find_value(asic, "market_name")),
                device_id=parse_hexadecimal(find_value(asic, "device_id"))
                or _parse_uuid_id(str(other.get("uuid", ""))),
                memory_bytes=parse_size(find_value(entry, "vram", "size")),
                architecture=parse_architecture(parse_text(find_value(asic, "target_graphics_version"))),
                power_w=find_power_limit(find_value(entry, "limit")),
                driver=parse_version(parse_text(find_value(entry, "driver", "version"))),
                numa_node=parse_integer(find_value(entry, "numa", "node")),
            )
        )
    return found


def parse_rocm_smi(texts: Sequence[str]) -> list[ToolReading]:
    """`rocm-smi --show...` as JSON or as text; the case of keys varies."""
    gpus = _parse_rocm_smi_json(texts[0]) if "{" in texts[0] else _parse_rocm_smi_text(texts[0])
    found = []
    for index, values in sorted(gpus.items()):
        low = {key.lower(): value for key, value in values.items()}
        memory = parse_number(low.get("vram total memory (b)"))
        found.append(
            ToolReading(
                tool="rocm-smi",
                index=index,
                bdf=pci.normalize_address(low.get("pci bus", "")),
                name=parse_text(low.get("card series")),
                device_id=parse_hexadecimal(low.get("device id")) or _find_known_id(low.get("card model")),
                memory_bytes=int(memory) if memory else None,
                architecture=parse_architecture(parse_text(low.get("gfx version"))),
                power_w=parse_number(low.get("max graphics package power (w)")),
                driver=parse_version(parse_text(low.get("driver version"))),
            )
        )
    return found


def _find_known_id(card_model: str | None) -> int | None:
    """The device id, which newer versions print as the card's model; older versions print the board's subsystem id."""
    found = parse_hexadecimal(card_model)
    return found if found is not None and profile.find_profile_by_id("amd", found) else None


def _parse_rocm_smi_json(output: str) -> dict[int, dict[str, str]]:
    gpus = {key: value for key, value in parse_json(output).items() if re.fullmatch(r"card\d+", key)}
    return {int(key[4:]): {name: str(value) for name, value in values.items()} for key, values in gpus.items()}


def _parse_rocm_smi_text(output: str) -> dict[int, dict[str, str]]:
    gpus: dict[int, dict[str, str]] = {}
    for index, key, value in re.findall(r"^GPU\[(\d+)\]\s*: ([^:\n]+):[ \t]*(.*)$", output, re.MULTILINE):
        gpus.setdefault(int(index), {})[key.strip()] = value.strip()
    return gpus


def parse_rocminfo(texts: Sequence[str]) -> list[ToolReading]:
    """The GPU agents; a BDFID is bus and function in one number, without the domain."""
    found: list[ToolReading] = []
    for agent in re.split(r"^Agent \d+\s*$", texts[0], flags=re.MULTILINE)[1:]:
        values = dict(reversed(re.findall(r"^\s*([A-Z][^:\n]*?):\s+(.*?)\s*$", agent, re.MULTILINE)))
        if values.get("Device Type") != "GPU":
            continue
        location, sizes = parse_integer(values.get("BDFID")), re.findall(r"Size:\s+(\d+)\(0x[0-9a-f]+\) KB", agent)
        found.append(
            ToolReading(
                tool="rocminfo",
                index=len(found),
                bdf=None if location is None else pci.decode_location(location),
                name=parse_text(values.get("Marketing Name")),
                device_id=parse_integer(values.get("Chip ID", "").partition("(")[0]),
                memory_bytes=max(int(kib) for kib in sizes) << 10 if sizes else None,
                architecture=parse_architecture(values.get("Name")),
            )
        )
    return found


NVIDIA_FIELDS = ("index", "name", "pci.bus_id", "memory.total", "driver_version")


def parse_nvidia_smi(texts: Sequence[str]) -> list[ToolReading]:
    """`nvidia-smi --query-gpu=... --format=csv`; any cell of a failed device may be ``[Unknown Error]``."""
    found: list[ToolReading] = []
    for position, row in enumerate(parse_table(texts[0], NVIDIA_FIELDS)):
        index = parse_integer(row["index"])
        found.append(
            ToolReading(
                tool="nvidia-smi",
                index=position if index is None else index,
                bdf=pci.normalize_address(row["pci.bus_id"]),
                name=parse_text(row["name"]),
                memory_bytes=parse_size(row["memory.total"]),
                driver=parse_version(parse_text(row["driver_version"])),
            )
        )
    return found


TORCH = (
    "import json, torch; p = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())];"
    "print(json.dumps([{'name': d.name, 'memory': d.total_memory, 'arch': getattr(d, 'gcnArchName', None),"
    " 'pci': [getattr(d, 'pci_' + k, None) for k in ('domain_id', 'bus_id', 'device_id')]} for d in p]))"
)
"""Runs in a separate process: importing torch takes seconds."""


def parse_torch(texts: Sequence[str]) -> list[ToolReading]:
    """Devices that torch sees, which visibility variables limit."""
    found = []
    for index, entry in enumerate(find_entries(texts[0])):
        domain, bus, device = entry["pci"]
        found.append(
            ToolReading(
                tool="torch",
                index=index,
                bdf=None if bus is None else pci.decode_location(bus << 8 | (device or 0) << 3, domain or 0),
                name=parse_text(entry["name"]),
                memory_bytes=parse_integer(entry["memory"]),
                architecture=parse_architecture(parse_text(entry["arch"])),
            )
        )
    return found


_TORCH = ToolSource(tool="torch", questions=(interpreter.build_code_command(sys.executable, TORCH),), parse=parse_torch)
SOURCES: dict[Vendor, tuple[ToolSource, ...]] = {
    "amd": (
        ToolSource(
            tool="amd-smi",
            questions=(("amd-smi", "static", "--json"), ("amd-smi", "list", "--json")),
            parse=parse_amd_smi,
        ),
        ToolSource(
            tool="rocm-smi",
            questions=(("rocm-smi", "--showproductname", "--showbus", "--showmeminfo", "vram", "--json"),),
            parse=parse_rocm_smi,
        ),
        ToolSource(tool="rocminfo", questions=(("rocminfo",),), parse=parse_rocminfo),
        _TORCH,
    ),
    "nvidia": (
        ToolSource(
            tool="nvidia-smi",
            questions=(("nvidia-smi", f"--query-gpu={','.join(NVIDIA_FIELDS)}", "--format=csv"),),
            parse=parse_nvidia_smi,
        ),
        _TORCH,
    ),
}
"""In the order of precedence; torch is last and slowest."""


def parse_json(output: str) -> Any:
    """The JSON value in an output that may contain other text: warnings, a progress line, a prompt.

    The longest value is returned: a warning may start with ``[1]``, which is JSON as well.

    Raises:
        ValueError: There is none, or it is invalid.
    """
    decoder, best, place, longest = json.JSONDecoder(), None, 0, 0
    while (bracket := _BRACKET.search(output, place)) is not None:
        begin = bracket.start()
        try:
            value, place = decoder.raw_decode(output, begin)
        except json.JSONDecodeError as error:
            inside = output[begin + 1 : error.pos]
            if "\n" in inside.strip() and error.pos - begin > longest:
                raise  # invalid JSON of several lines: an inner value must not be taken for the whole
            is_prose = not inside.strip()  # a word in brackets, such as [WARNING]
            place = begin + 1 if is_prose else _find_end_of_line(output, begin)
            continue
        if place - begin > longest:
            best, longest = value, place - begin
    if not longest:
        raise ValueError("no JSON")
    return best


_BRACKET = re.compile(r"[\[{]")


def _find_end_of_line(output: str, place: int) -> int:
    end = output.find("\n", place)
    return len(output) if end < 0 else end


def find_entries(output: str) -> list[dict[str, Any]]:
    """The entries of a bare list, or of one under ``gpu_data``.

    Raises:
        ValueError: The output is neither.
    """
    value = parse_json(output)
    listed = value.get("gpu_data") if isinstance(value, dict) else value
    if not isinstance(listed, list) or not all(isinstance(entry, dict) for entry in listed):
        raise ValueError("no list of devices")
    return listed


def parse_table(output: str, fields: Sequence[str]) -> list[dict[str, str]]:
    """Rows of a CSV table by field; a header, with or without units, is skipped. Shorter lines are not rows; the
    last field of longer lines holds the rest, since nvidia-smi does not quote.

    Raises:
        ValueError: The text has neither a row nor a header.
    """
    last = len(fields) - 1
    lines = [[cell.strip() for cell in line.split(",", last)] for line in output.splitlines()]
    rows = [line for line in lines if len(line) == len(fields)]
    if output.strip() and not rows:
        raise ValueError("no table")
    return [dict(zip(fields, row, strict=True)) for row in rows if row[0] != fields[0]]


def find_value(value: Any, *keys: str) -> Any:
    """The value under `keys`; None without one."""
    for key in keys:
        value = value.get(key) if isinstance(value, dict) else None
    return value


def parse_text(value: Any) -> str | None:
    """Text of a value; None for N/A in any spelling, and for what nvidia-smi writes in brackets instead of a value:
    ``[Unknown Error]``, ``[GPU is lost]``, ``[GPU requires reset]``, ``[Insufficient Permissions]``."""
    text = str(value).strip() if value is not None else ""
    return None if not text or re.fullmatch(r"\[[^\]]*\]|n/a|not supported|not found|none", text.lower()) else text


def parse_number(value: Any) -> float | None:
    """A plain number, a number with a unit, or ``{"value", "unit"}``; None for anything else."""
    if isinstance(value, dict):
        value = value.get("value")
    match = re.match(r"-?\d{1,18}(?:\.\d+)?(?=[\s%a-zA-Z°]|$)", str(value).strip())
    return float(match[0]) if match and not isinstance(value, bool) else None


def parse_integer(value: Any) -> int | None:
    """A whole number in any of the formats of `parse_number`."""
    found = parse_number(value)
    return None if found is None else int(found)


def parse_size(value: Any) -> int | None:
    """Bytes of a size with its unit, MiB without one."""
    found = parse_number(value)
    unit = value.get("unit") if isinstance(value, dict) else str(value).strip().rpartition(" ")[2]
    count = None if found is None else int(found * UNITS.get(str(unit).upper(), MIB))
    return count if count is not None and 0 <= count < 1 << 63 else None


def parse_hexadecimal(value: Any) -> int | None:
    """A number written as ``0x74a1``."""
    return int(value, 16) if isinstance(value, str) and re.fullmatch(r"0x[0-9a-fA-F]{1,8}", value) else None


def parse_architecture(value: str | None) -> str | None:
    """``gfx90a`` of ``gfx9010`` (rocm-smi's decimal step); features after a colon are dropped."""
    name = (value or "").partition(":")[0]
    match = re.fullmatch(r"gfx9(\d)(\d\d)", name)
    if match:
        return f"gfx9{match[1]}{int(match[2]):x}"
    return name if re.fullmatch(r"gfx[0-9a-f]{3,4}", name) else None


def parse_version(value: str | None) -> str | None:
    """A driver version; for the in-tree driver amd-smi prints the kernel's full version text."""
    return value if value and re.fullmatch(r"\d+(\.\d+)+\S*", value) else None


def find_power_limit(limit: Any) -> float | None:
    """The current power cap in watts, flat or under ``ppt0``; `max_power` is the highest configurable cap."""
    found = (
        find_value(limit, "ppt0", "socket_power_limit"),
        find_value(limit, "socket_power"),
        find_value(limit, "current_power"),
    )
    return next((watt for value in found if (watt := parse_number(value)) is not None), None)


def _parse_uuid_id(uuid: str) -> int | None:
    """amd-smi's UUID begins with the device id: 75ff75a3-... is 0x75a3."""
    match = re.match(r"[0-9a-f]{2}ff([0-9a-f]{4})-", uuid)
    return int(match[1], 16) if match else None
