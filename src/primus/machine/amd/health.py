"""Live values of AMD GPUs: the graphics driver's files, KFD's list of processes, amd-smi, or rocm-smi if amd-smi is not
installed.

Files: Linux Documentation/gpu/amdgpu (thermal, ras, driver-misc); JSON: AMD SMI documentation, `metric`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from primus.machine import pci
from primus.machine.amd import devices as amd
from primus.machine.facts import Device
from primus.machine.tools import smi
from primus.machine.tools.smi import find_value, parse_integer, parse_number, parse_size
from primus.machine.tools.vitals import (
    UNCLEAR_LIMIT,
    Process,
    ToolCall,
    Vitals,
    ask_tools,
    index_by_address,
    parse_answer,
    parse_percent,
)
from primus.machine.tree import FileTree

Entry = dict[str, Any]
PROCESSES = "sys/class/kfd/kfd/proc"
AMD_SMI = tuple(("amd-smi", what, "--json") for what in ("list", "metric", "process", "bad-pages", "static"))
ROCM_SMI = ("rocm-smi", "--showbus", "--showuse", "--showtemp", "--showpower", "--showmeminfo", "vram", "--json")


def read_kernel_vitals(tree: FileTree, gpus: Sequence[Device]) -> dict[int, Vitals]:
    """Values from the kernel's files, by GPU."""
    processes = _read_processes(tree, gpus)
    return {gpu.index: _read_driver_vitals(tree, gpu, processes) for gpu in gpus}


def _read_driver_vitals(tree: FileTree, gpu: Device, processes: Mapping[int, tuple[Process, ...]] | None) -> Vitals:
    folder = f"{pci.DEVICES}/{gpu.bdf}"
    sensors = _read_sensors(tree, folder)
    errors = tree.read_text(f"{folder}/ras/umc_err_count") or ""
    pages = tree.read_text(f"{folder}/ras/gpu_vram_bad_pages")
    clock, max_clock = _parse_clocks(tree.read_text(f"{folder}/pp_dpm_sclk") or "")
    return Vitals(
        temperature_c=sensors.get("temp junction") or sensors.get("temp edge"),
        memory_temperature_c=sensors.get("temp mem"),
        power_w=sensors.get("power"),
        power_cap_w=sensors.get("power cap"),
        memory_used_bytes=tree.read_number(f"{folder}/mem_info_vram_used"),
        activity_percent=parse_percent(tree.read_text(f"{folder}/gpu_busy_percent")),
        ecc_correctable=_parse_error_count("ce", errors),
        ecc_uncorrectable=_parse_error_count("ue", errors),
        bad_pages=None if pages is None else len(re.findall(r": R$", pages, re.MULTILINE)),
        pending_pages=None if pages is None else len(re.findall(r": P$", pages, re.MULTILINE)),
        unreservable_pages=None if pages is None else len(re.findall(r": F$", pages, re.MULTILINE)),
        bad_page_threshold=_read_page_threshold(tree),
        pcie_replays=tree.read_number(f"{folder}/pcie_replay_count"),
        clock_mhz=clock,
        max_clock_mhz=max_clock,
        memory_clock_mhz=_parse_clocks(tree.read_text(f"{folder}/pp_dpm_mclk") or "")[0],
        processes=None if processes is None else processes.get(gpu.index, ()),
    )


def _read_page_threshold(tree: FileTree) -> int | None:
    """Bad pages that the driver allows, if it was loaded with an explicit number; 0 and below select a rule.

    Source: Linux drivers/gpu/drm/amd/amdgpu/amdgpu_drv.c, bad_page_threshold.
    """
    text = tree.read_text("sys/module/amdgpu/parameters/bad_page_threshold") or ""
    return (int(text) or None) if re.fullmatch(r"\d{1,9}", text) else None


def _read_sensors(tree: FileTree, folder: str) -> dict[str, float]:
    """hwmon values in degrees Celsius and watts; the files hold thousandths and millionths."""
    found: dict[str, float] = {}
    for monitor in tree.list_names(f"{folder}/hwmon"):
        base = f"{folder}/hwmon/{monitor}"
        for sensor in ("temp1", "temp2", "temp3"):
            label, value = tree.read_text(f"{base}/{sensor}_label"), tree.read_number(f"{base}/{sensor}_input")
            if label and value is not None:
                found[f"temp {label}"] = value / 1e3
        for name, files in (("power", ("power1_average", "power1_input")), ("power cap", ("power1_cap",))):
            values = [value for file in files if (value := tree.read_number(f"{base}/{file}")) is not None]
            found |= {name: values[0] / 1e6} if values else {}
    return found


def _parse_clocks(levels: str) -> tuple[float | None, float | None]:
    """The current clock (marked with *) and the highest clock, in MHz."""
    found = [(float(clock), mark == "*") for clock, mark in re.findall(r"^\w+: (\d+)Mhz ?(\*?)", levels, re.MULTILINE)]
    now = next((clock for clock, is_now in found if is_now), None)
    return now, max((clock for clock, _ in found), default=None)


def _parse_error_count(kind: str, errors: str) -> int | None:
    match = re.search(rf"^{kind}: (\d{{1,18}})$", errors, re.MULTILINE)
    return int(match[1]) if match else None


def _read_processes(tree: FileTree, gpus: Sequence[Device]) -> dict[int, tuple[Process, ...]] | None:
    """Processes by GPU, from KFD's files `vram_<gpu_id>`; None if the kernel has no such list."""
    if not (tree.root / PROCESSES).is_dir():
        return None
    gpu_of = {tree.read_text(f"{amd.NODES}/{part.node}/gpu_id"): gpu.index for gpu in gpus for part in gpu.partitions}
    found: dict[int, dict[int, Process]] = {gpu.index: {} for gpu in gpus}
    # Processes exit while the folders are read: a missing file counts as no memory.
    for pid in tree.list_names(PROCESSES):
        for file in tree.list_names(f"{PROCESSES}/{pid}"):
            index = gpu_of.get(file.removeprefix("vram_")) if file.startswith("vram_") else None
            if index is None or not pid.isdecimal():
                continue
            before = found[index].get(int(pid), Process(pid=int(pid))).memory_bytes or 0
            used = before + (tree.read_number(f"{PROCESSES}/{pid}/{file}") or 0)
            found[index][int(pid)] = Process(
                pid=int(pid), name=tree.read_text(f"proc/{pid}/comm") or "", memory_bytes=used
            )
    return {index: tuple(holders.values()) for index, holders in found.items()}


def read_tool_vitals(
    gpus: Sequence[Device], environ: Mapping[str, str], timeout_s: float
) -> Iterator[tuple[str, dict[int, Vitals], list[ToolCall]]]:
    """Values of each GPU from amd-smi, or from rocm-smi if amd-smi is not installed."""
    answers, calls = ask_tools(AMD_SMI, environ, timeout_s)
    # Any call means that amd-smi is installed: if it failed or hung, rocm-smi would use the same driver.
    if calls:
        yield "amd-smi", ask_amd_smi(answers, gpus, calls), calls
        return
    answers, calls = ask_tools([ROCM_SMI], environ, timeout_s)
    yield (
        "rocm-smi",
        parse_answer(lambda text: ask_rocm_smi(text, gpus), answers[0], {}, calls, "rocm-smi --showbus"),
        calls,
    )


def ask_amd_smi(answers: Sequence[str], gpus: Sequence[Device], calls: list[ToolCall]) -> dict[int, Vitals]:
    """The values of all queries merged. A partitioned GPU has the values of its first partition, whose sensors are
    those of the GPU, and the processes of all partitions."""
    empty: list[Entry] = []
    listed, *others = (
        parse_answer(smi.find_entries, answer, empty, calls, f"amd-smi {argv[1]}")
        for argv, answer in zip(AMD_SMI, answers, strict=True)
    )
    addresses = index_by_address(gpus)
    gpu_of = {entry.get("gpu"): addresses.get(pci.normalize_address(str(entry.get("bdf"))) or "") for entry in listed}
    if not listed and all(len(entries) in (0, len(gpus)) for entries in others):
        gpu_of = {position: gpu.index for position, gpu in enumerate(gpus)}
    found = {}
    for gpu in gpus:
        own = [[entry for entry in entries if gpu_of.get(entry.get("gpu")) == gpu.index] for entries in others]
        metric, process, pages, static = own
        found[gpu.index] = _parse_vitals(
            _find_first_entry(metric), process, _find_first_entry(pages), _find_first_entry(static)
        )
    return found


def _find_first_entry(entries: Sequence[Entry]) -> Entry:
    return entries[0] if entries else {}


def _parse_vitals(metric: Entry, processes: Sequence[Entry], pages: Entry, static: Entry) -> Vitals:
    clock = find_value(metric, "clock", "gfx_0")
    return Vitals(
        temperature_c=parse_number(find_value(metric, "temperature", "hotspot")),
        memory_temperature_c=parse_number(find_value(metric, "temperature", "mem")),
        power_w=parse_number(find_value(metric, "power", "socket_power")),
        power_cap_w=smi.find_power_limit(find_value(static, "limit")),
        energy_j=parse_number(find_value(metric, "energy", "total_energy_consumption")),
        memory_used_bytes=parse_size(find_value(metric, "mem_usage", "used_vram")),
        activity_percent=parse_percent(find_value(metric, "usage", "gfx_activity")),
        ecc_correctable=parse_integer(find_value(metric, "ecc", "total_correctable_count")),
        ecc_uncorrectable=parse_integer(find_value(metric, "ecc", "total_uncorrectable_count")),
        bad_pages=_count_pages(pages, "retired"),
        pending_pages=_count_pages(pages, "pending"),
        unreservable_pages=_count_pages(pages, "un_res"),
        bad_page_threshold=parse_integer(find_value(static, "ras", "bad_page_threshold")),
        has_exceeded_bad_pages=_parse_flag(find_value(static, "ras", "bad_page_threshold_exceeded")),
        throttle=_find_throttle_reasons(metric),
        pcie_replays=parse_integer(find_value(metric, "pcie", "replay_count")),
        clock_mhz=parse_number(find_value(clock, "clk")),
        max_clock_mhz=parse_number(find_value(clock, "max_clk")),
        memory_clock_mhz=parse_number(find_value(metric, "clock", "mem_0", "clk")),
        processes=_parse_process_lists(processes),
    )


def _parse_flag(value: object) -> bool | None:
    return {"true": True, "false": False}.get(str(value).lower())


def _count_pages(entry: Entry, kind: str) -> int | None:
    """Number of pages; amd-smi prints a list, or a sentence if there are none."""
    pages = entry.get(kind)
    if isinstance(pages, str):
        return 0 if "no bad pages" in pages.lower() else None
    return len(pages) if isinstance(pages, list) else None


def _find_throttle_reasons(metric: Entry) -> tuple[str, ...] | None:
    """Limits that are violated now: ``ppt``, ``socket_thermal``."""
    limits = find_value(metric, "throttle")
    limits = limits if isinstance(limits, dict) else {}
    known = {key.removesuffix("_violation_status"): limits[key] for key in limits if key.endswith("_violation_status")}
    if any(value in ("ACTIVE", "NOT ACTIVE") for value in known.values()):
        return tuple(name for name, value in known.items() if value == "ACTIVE")
    status = {"UNTHROTTLED": (), "THROTTLED": (UNCLEAR_LIMIT,)}
    return status.get(str(find_value(metric, "power", "throttle_status")))


def _parse_process_lists(entries: Sequence[Entry]) -> tuple[Process, ...] | None:
    """The processes; amd-smi prints a sentence if there are none. A process with 0 B still holds the device."""
    lists = [listed for entry in entries if isinstance(listed := entry.get("process_list"), list)]
    infos = [find_value(item, "process_info") for listed in lists for item in listed]
    found = tuple(
        Process(
            pid=pid,
            name=smi.parse_text(find_value(info, "name")) or "",
            memory_bytes=parse_size(find_value(info, "memory_usage", "vram_mem") or find_value(info, "mem_usage")),
        )
        for info in infos
        if (pid := parse_integer(find_value(info, "pid"))) is not None
    )
    return found if lists else None


def ask_rocm_smi(text: str, gpus: Sequence[Device]) -> dict[int, Vitals]:
    """The values of `rocm-smi --show... --json`, whose keys carry the units."""
    addresses, found = index_by_address(gpus), {}
    for values in smi.parse_json(text).values():
        low = {key.lower(): value for key, value in values.items()} if isinstance(values, dict) else {}
        index = addresses.get(pci.normalize_address(low.get("pci bus", "")) or "")
        if index is not None:
            found[index] = Vitals(
                temperature_c=parse_number(low.get("temperature (sensor junction) (c)")),
                memory_temperature_c=parse_number(low.get("temperature (sensor memory) (c)")),
                power_w=parse_number(
                    low.get("average graphics package power (w)")
                    or low.get("current socket graphics package power (w)")
                ),
                memory_used_bytes=parse_integer(low.get("vram total used memory (b)")),
                activity_percent=parse_percent(low.get("gpu use (%)")),
            )
    return found
