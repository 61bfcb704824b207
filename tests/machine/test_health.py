"""Live values come from the kernel's files and from tools; one that hangs is told, not waited for."""

from __future__ import annotations

import json
import shutil
import sys
import time
from pathlib import Path

import pytest

from fakes.tools import is_gone, tool
from machines.tree import HERE
from primus.machine.facts import Device, MachineFacts, Partition, Vendor
from primus.machine.health import read_health
from primus.machine.probe import probe
from primus.machine.tools.vitals import Process, RowRemapping

METRIC = {
    "usage": {"gfx_activity": {"value": 7, "unit": "%"}},
    "energy": {"total_energy_consumption": {"value": 1245.662, "unit": "J"}},
    "power": {"socket_power": {"value": 239, "unit": "W"}, "throttle_status": "UNTHROTTLED"},
    "temperature": {"hotspot": {"value": 36, "unit": "C"}, "mem": {"value": "N/A", "unit": "C"}},
    "mem_usage": {"total_vram": {"value": 294896, "unit": "MB"}, "used_vram": {"value": 283, "unit": "MB"}},
    "ecc": {"total_correctable_count": 2, "total_uncorrectable_count": 0},
    "pcie": {"replay_count": 3},
    "clock": {
        "gfx_0": {"clk": {"value": 132, "unit": "MHz"}, "max_clk": {"value": 2400, "unit": "MHz"}},
        "mem_0": {"clk": {"value": 900, "unit": "MHz"}},
    },
}
LISTED = [{"gpu": 0, "bdf": "fff0:05:00.0"}, {"gpu": 1, "bdf": "fff0:27:00.0"}]


def machine(vendor: Vendor = "amd") -> MachineFacts:
    """Two cards; the second is listed first by no tool, so that an order cannot be taken for an address."""
    parts = [Partition(index=0, node=2), Partition(index=1, node=3)]
    addresses = ["fff0:27:00.0", "fff0:05:00.0"]
    cards = (Device(index=i, vendor=vendor, bdf=addresses[i], partitions=(parts[i],)) for i in range(2))
    return MachineFacts(devices=tuple(cards))


def amd_smi(folder: Path, **answers: object) -> dict[str, str]:
    """An amd-smi that answers each question with the JSON of its name, `bad_pages` for bad-pages."""
    cases = "\n".join(
        f"{name.replace('_', '-')}) cat <<'END'\n{json.dumps(said)}\nEND\n;;" for name, said in answers.items()
    )
    return tool(folder, "amd-smi", f"case $1 in\n{cases}\n*) echo unknown command >&2; exit 2;; esac")


def test_amd_smi_gives_the_values_of_each_address(tmp_path: Path) -> None:
    processes = [
        {"process_info": {"pid": 42, "name": "python3", "memory_usage": {"vram_mem": {"value": 0, "unit": "B"}}}}
    ]
    environ = amd_smi(
        tmp_path,
        list=LISTED,
        metric={"gpu_data": [{"gpu": 0, **METRIC}, {"gpu": 1, "usage": {"gfx_activity": "N/A"}}]},
        process=[
            {"gpu": 0, "process_list": processes},
            {"gpu": 1, "process_list": [{"process_info": "No running processes"}]},
        ],
        bad_pages=[{"gpu": 0, "retired": [{"page_address": "0x1"}], "pending": "No bad pages found.", "un_res": "N/A"}],
        static={
            "gpu_data": [
                {
                    "gpu": 0,
                    "limit": {"ppt0": {"socket_power_limit": {"value": 1200}, "max_power_limit": {"value": 1400}}},
                    "ras": {"bad_page_threshold": 256, "bad_page_threshold_exceeded": "False"},
                }
            ]
        },
    )
    idle, busy = read_health(machine(), environ).devices
    assert (busy.temperature_c, busy.memory_temperature_c, busy.power_w, busy.activity_percent) == (36, None, 239, 7)
    assert (busy.memory_used_bytes, busy.ecc_correctable, busy.ecc_uncorrectable) == (283 << 20, 2, 0)
    assert (busy.bad_pages, busy.pending_pages, busy.pcie_replays, busy.throttle) == (1, 0, 3, ())
    assert (busy.clock_mhz, busy.max_clock_mhz, busy.memory_clock_mhz) == (132, 2400, 900)
    assert busy.processes == (Process(pid=42, name="python3", memory_bytes=0),)
    assert (busy.unreservable_pages, busy.bad_page_threshold, busy.has_exceeded_bad_pages) == (None, 256, False)
    assert busy.energy_j == 1245.662 and busy.power_cap_w == 1200 and busy.sources["power_w"] == "amd-smi"
    assert (idle.activity_percent, idle.processes, idle.bad_pages) == (None, (), None)


def test_processes_of_all_partitions_are_the_cards(tmp_path: Path) -> None:
    parts = tuple(Partition(index=index, bdf=f"fff0:05:00.{index}") for index in range(2))
    facts = MachineFacts(devices=(Device(index=0, vendor="amd", bdf="fff0:05:00.0", partitions=parts),))
    environ = amd_smi(
        tmp_path,
        list=[{"gpu": index, "bdf": f"fff0:05:00.{index}"} for index in range(2)],
        metric=[{"gpu": 0, **METRIC}, {"gpu": 1, "usage": {"gfx_activity": 90}}],
        process=[{"gpu": gpu, "process_list": [{"process_info": {"pid": 40 + gpu}}]} for gpu in range(2)],
    )
    (card,) = read_health(facts, environ).devices
    assert [process.pid for process in card.processes or ()] == [40, 41] and card.activity_percent == 7


def test_violated_limits_are_named(tmp_path: Path) -> None:
    limits = {"ppt_violation_status": "ACTIVE", "prochot_violation_status": "NOT ACTIVE", "ppt_accumulated": 5}
    environ = amd_smi(tmp_path, list=LISTED, metric=[{"gpu": 0, "throttle": limits}])
    assert read_health(machine(), environ).devices[1].throttle == ("ppt",)


def test_na_in_place_of_any_group_of_values_is_nothing(tmp_path: Path) -> None:
    nothing = dict.fromkeys([*METRIC, "throttle", "process_list", "retired", "pending", "limit"], "N/A")
    answers = {question: [{"gpu": 0, **nothing}] for question in ("metric", "process", "bad_pages", "static")}
    found = read_health(machine(), amd_smi(tmp_path, list=LISTED, **answers))
    assert not any(call.problem for call in found.calls)
    assert found.devices[1].sources == {}


@pytest.mark.parametrize("activity", [50288, -1, {"value": 50288, "unit": "%"}])
def test_a_raw_counter_is_no_percentage(tmp_path: Path, activity: object) -> None:
    environ = amd_smi(tmp_path, list=LISTED, metric=[{"gpu": 0, "usage": {"gfx_activity": activity}}])
    assert read_health(machine(), environ).devices[1].activity_percent is None


def test_a_tool_that_hangs_is_ended_with_its_children_and_told(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    environ = tool(tmp_path / "bin", "amd-smi", f"sleep 300 & echo $! $$ >> {pids}; wait")
    began = time.monotonic()
    found = read_health(machine(), environ, timeout_s=0.5)
    assert time.monotonic() - began < 5
    assert {call.problem for call in found.calls} == {"amd-smi gave no response in 0.5 s"}
    assert [call.tool for call in found.calls] == [
        f"amd-smi {what}" for what in ("list", "metric", "process", "bad-pages", "static")
    ]
    written = pids.read_text().split()
    assert len(written) == 10 and all(is_gone(int(pid)) for pid in written)
    assert found.devices[0].power_w is None


def test_broken_json_is_told_and_the_other_answers_count(tmp_path: Path) -> None:
    environ = amd_smi(tmp_path, list=LISTED, metric=[{"gpu": 0, **METRIC}], bad_pages=[{"gpu": 0, "retired": []}])
    script = tmp_path / "amd-smi"
    script.write_text(script.read_text().replace('"power":', '"power"'))
    found = read_health(machine(), environ)
    problems = {call.tool: call.problem for call in found.calls}
    assert "its output cannot be parsed" in problems["amd-smi metric"]
    assert problems["amd-smi process"] == "unknown command" and problems["amd-smi list"] == ""
    assert found.devices[1].power_w is None and found.devices[1].bad_pages == 0


def test_rocm_smi_answers_where_there_is_no_amd_smi(tmp_path: Path) -> None:
    card = {
        "PCI Bus": "fff0:05:00.0",
        "GPU use (%)": "50288",
        "Temperature (Sensor junction) (C)": "35.0",
        "Average Graphics Package Power (W)": "133.0",
        "VRAM Total Used Memory (B)": "297447424",
    }
    environ = tool(tmp_path, "rocm-smi", f"echo '{json.dumps({'card0': card, 'system': {}})}'")
    found = read_health(machine(), environ)
    device = found.devices[1]
    assert (device.temperature_c, device.power_w, device.memory_used_bytes) == (35, 133, 297447424)
    assert device.activity_percent is None and device.sources["power_w"] == "rocm-smi"
    assert [call.tool for call in found.calls] == ["rocm-smi --showbus"]


def test_without_any_tool_nothing_is_known_and_nothing_fails(tmp_path: Path) -> None:
    for vendor in ("amd", "nvidia"):
        found = read_health(machine(vendor), {"PATH": str(tmp_path)})
        assert found.calls == () and found.devices[0].power_w is None and found.devices[0].processes is None


GPU = {
    "temperature.gpu": "32",
    "temperature.memory": "40",
    "power.draw": "120.50 W",
    "power.limit": "700.00 W",
    "memory.total": "81559 MiB",
    "memory.used": "4 MiB",
    "utilization.gpu": "0 %",
    "ecc.errors.corrected.volatile.total": "1",
    "ecc.errors.uncorrected.volatile.total": "0",
    "ecc.errors.uncorrected.aggregate.sram.thresholdExceeded": "No",
    "gpu_recovery_action": "None",
    "clocks_event_reasons.active": "0x0000000000000024",
    "clocks.sm": "345 MHz",
    "clocks.max.sm": "1980 MHz",
    "clocks.mem": "2619 MHz",
}
ROWS = {"correctable": "1", "uncorrectable": "2", "pending": "Yes", "failure": "No", "histogram.max": "636",
        "histogram.high": "2", "histogram.partial": "1", "histogram.low": "1", "histogram.none": "0"}  # fmt: skip
APPS = [
    {"pid": "77", "used_memory": "512 MiB", "process_name": "python3 --steps 1,2"},
    {"pid": "78", "used_memory": "[N/A]", "process_name": "[Not Found]"},
]
FIRST, SECOND = "0000FFF0:05:00.0", "0000FFF0:27:00.0"


def nvidia_smi(folder: Path, *gpus: dict[str, str], unknown: tuple[str, ...] = ()) -> dict[str, str]:
    """An nvidia-smi that prints what is asked, and refuses a query with a field that it does not know, as it does."""
    tables = {
        "--query-gpu": [{"pci.bus_id": bus} | gpu for bus, gpu in zip((FIRST, SECOND), gpus, strict=False)],
        "--query-remapped-rows": [
            {"gpu_bus_id": FIRST} | {f"remapped_rows.{name}": value for name, value in ROWS.items()}
        ],
        "--query-compute-apps": [{"gpu_bus_id": FIRST} | app for app in APPS],
    }
    program = f"""
import sys
flag, _, asked = sys.argv[1].partition("=")
fields, rows = asked.split(","), {tables!r}[flag]
for field in fields:
    if field in {unknown!r} or not any(field in row for row in rows):
        print(f'Field "{{field}}" is not a valid field to query.')
        sys.exit(2)
print(", ".join(fields))
for row in rows:
    print(", ".join(row.get(field, "[N/A]") for field in fields))
"""
    (folder / "nvidia_smi.py").write_text(program)
    return tool(folder, "nvidia-smi", f'exec {sys.executable} {folder}/nvidia_smi.py "$@"')


def test_nvidia_smi_gives_the_values_of_each_address(tmp_path: Path) -> None:
    other = {"temperature.gpu": "33", "clocks_event_reasons.active": "0x0000000000000001"}
    bare, full = read_health(machine("nvidia"), nvidia_smi(tmp_path, GPU, other)).devices
    assert (full.temperature_c, full.power_w, full.power_cap_w, full.memory_used_bytes) == (32, 120.5, 700, 4 << 20)
    assert (full.activity_percent, full.ecc_correctable, full.ecc_uncorrectable) == (0, 1, 0)
    assert (full.bad_pages, full.clock_mhz, full.max_clock_mhz) == (None, 345, 1980)
    assert (full.recovery_action, full.has_exceeded_sram_errors, full.shares_host_memory) == ("None", False, None)
    assert full.throttle == ("sw_power_cap", "sw_thermal_slowdown")
    assert full.processes == (Process(pid=77, name="python3 --steps 1,2", memory_bytes=512 << 20), Process(pid=78))
    assert (bare.temperature_c, bare.power_w, bare.remapping, bare.throttle, bare.processes) == (33, None, None, (), ())


def test_rows_that_were_replaced_are_told_with_their_flags_and_spares(tmp_path: Path) -> None:
    rows = read_health(machine("nvidia"), nvidia_smi(tmp_path, GPU)).devices[1].remapping
    assert rows == RowRemapping(
        corrected=1,
        uncorrected=2,
        is_pending=True,
        has_failed=False,
        banks={"max": 636, "high": 2, "partial": 1, "low": 1, "none": 0},
    )


@pytest.mark.parametrize(
    "unknown",
    [
        ("clocks_event_reasons.active",),
        ("gpu_recovery_action", "ecc.errors.uncorrected.aggregate.sram.thresholdExceeded"),
        tuple(f"remapped_rows.{name}" for name in ROWS if name.startswith("histogram")),
    ],
)
def test_a_field_that_nvidia_smi_does_not_know_costs_that_value_only(tmp_path: Path, unknown: tuple[str, ...]) -> None:
    older = {"clocks_throttle_reasons.active": GPU["clocks_event_reasons.active"]}
    found = read_health(machine("nvidia"), nvidia_smi(tmp_path, GPU | older, unknown=unknown))
    card = found.devices[1]
    assert [call.problem for call in found.calls] == ["", "", ""]
    assert (card.temperature_c, card.memory_used_bytes, card.throttle) == (
        32, 4 << 20, ("sw_power_cap", "sw_thermal_slowdown"),
    )  # fmt: skip
    assert card.remapping and card.remapping.uncorrected == 2 and len(card.processes or ()) == 2


def test_a_tool_that_refuses_each_field_is_asked_a_bounded_number_of_times(tmp_path: Path) -> None:
    fields = (*GPU, "clocks_throttle_reasons.active", "pci.bus_id")
    found = read_health(machine("nvidia"), nvidia_smi(tmp_path, GPU, unknown=fields))
    assert found.devices[1].temperature_c is None and "valid field" in found.calls[0].problem


def test_a_lost_card_says_nothing_and_hides_no_other(tmp_path: Path) -> None:
    lost = dict.fromkeys(GPU, "[Unknown Error]") | {"memory.used": "[GPU is lost]"}
    sound, failed = read_health(machine("nvidia"), nvidia_smi(tmp_path, lost, GPU)).devices
    assert (sound.memory_used_bytes, failed.memory_used_bytes, failed.shares_host_memory) == (4 << 20, None, None)
    assert (failed.recovery_action, failed.has_exceeded_sram_errors, failed.throttle) == (None, None, None)


def test_a_device_that_uses_the_hosts_memory_is_told_from_one_that_failed(tmp_path: Path) -> None:
    gb10 = GPU | {"memory.total": "[N/A]", "memory.used": "[N/A]"}
    assert read_health(machine("nvidia"), nvidia_smi(tmp_path, gb10)).devices[1].shares_host_memory


def test_the_kernels_files_come_first(tmp_path: Path) -> None:
    root = Path(shutil.copytree(HERE / "mi300x-8/sys", tmp_path / "sys", symlinks=True)).parent
    card = root / "sys/bus/pci/devices/0000:05:00.0"
    files = {
        "gpu_busy_percent": "12",
        "mem_info_vram_used": "297447424",
        "pcie_replay_count": "4",
        "pp_dpm_sclk": "0: 132Mhz *\n1: 2100Mhz",
        "ras/umc_err_count": "ue: 1\nce: 5",
        "ras/gpu_vram_bad_pages": "".join(f"0x0000000{flag} : 0x00001000 : {flag}\n" for flag in "RPF"),
        "hwmon/hwmon4/temp2_label": "junction",
        "hwmon/hwmon4/temp2_input": "36000",
        "hwmon/hwmon4/power1_average": "239000000",
        "hwmon/hwmon4/power1_cap": "750000000",
    }
    kfd = {"sys/module/amdgpu/parameters/bad_page_threshold": "-1"}
    kfd |= {f"sys/class/kfd/kfd/proc/4242/vram_{id_}": "1024" for id_ in (24248, 99999)}
    for name, text in {str(card.relative_to(root) / name): text for name, text in files.items()}.items() | kfd.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    (root / "proc/4242").mkdir(parents=True)
    (root / "proc/4242/comm").write_text("python3\n")
    found = read_health(probe(root), {}, root=root)
    first, second = found.devices[:2]
    assert (first.activity_percent, first.memory_used_bytes, first.pcie_replays) == (12, 297447424, 4)
    assert (first.clock_mhz, first.max_clock_mhz, first.temperature_c) == (132, 2100, 36)
    assert (first.power_w, first.power_cap_w, first.bad_pages, first.pending_pages) == (239, 750, 1, 1)
    assert (first.unreservable_pages, first.bad_page_threshold, found.problems) == (1, None, ())
    assert (first.ecc_uncorrectable, first.ecc_correctable) == (1, 5)
    assert first.processes == (Process(pid=4242, name="python3", memory_bytes=1024),)
    assert second.processes == () and second.power_w is None and first.sources["power_w"] == "kernel"
    assert found.calls == ()


def test_no_answer_about_processes_is_unknown_and_an_empty_table_is_none(tmp_path: Path) -> None:
    script = 'case $1 in --query-compute-apps*) exit 9;; esac; exec {python} {folder}/nvidia_smi.py "$@"'
    nvidia_smi(tmp_path, GPU, GPU)
    environ = tool(tmp_path, "nvidia-smi", script.format(python=sys.executable, folder=tmp_path))
    assert [card.processes for card in read_health(machine("nvidia"), environ).devices] == [None, None]


@pytest.mark.parametrize(
    ("bits", "reasons"),
    [
        ("0x40", ("hw_thermal_slowdown",)),
        ("0x88", ("hw_slowdown", "hw_power_brake_slowdown")),
        ("0x20", ("sw_thermal_slowdown",)),
        ("0x113", ()),  # idle, application clocks, sync boost, display clocks
    ],
)
def test_each_reason_for_a_low_clock_that_is_a_fault_is_named(
    tmp_path: Path, bits: str, reasons: tuple[str, ...]
) -> None:
    environ = nvidia_smi(tmp_path, GPU | {"clocks_event_reasons.active": bits})
    assert read_health(machine("nvidia"), environ).devices[1].throttle == reasons


@pytest.mark.parametrize("cell", ["memory.total", "memory.used"])
def test_a_card_that_lost_one_of_its_memory_values_does_not_count_as_one_without_memory(
    tmp_path: Path, cell: str
) -> None:
    other = {"memory.total": "memory.used", "memory.used": "memory.total"}[cell]
    card = GPU | {other: "[N/A]", cell: "[GPU is lost]"}
    assert read_health(machine("nvidia"), nvidia_smi(tmp_path, card)).devices[1].shares_host_memory is None


@pytest.mark.parametrize(("cell", "flag"), [("1", True), ("0", False), ("Yes", True), ("No", False), ("[N/A]", None)])
def test_a_flag_of_remapped_rows_is_a_word_or_a_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cell: str, flag: bool | None
) -> None:
    monkeypatch.setitem(ROWS, "pending", cell)
    rows = read_health(machine("nvidia"), nvidia_smi(tmp_path, GPU)).devices[1].remapping
    assert rows is not None and rows.is_pending is flag


def test_a_query_that_is_killed_in_a_later_pass_counts_as_a_hung_tool(tmp_path: Path) -> None:
    refuses = (
        "case $* in *gpu_recovery_action*) echo 'Field \"gpu_recovery_action\" is not a valid field'; exit 2;; esac"
    )
    environ = tool(tmp_path, "nvidia-smi", f"sleep 0.3; {refuses}; sleep 60")
    found = read_health(machine("nvidia"), environ, timeout_s=1.0)
    assert next(call for call in found.calls if "query-gpu" in call.tool).seconds == 1.0
