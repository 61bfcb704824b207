"""Checks of the NICs: error and pause counters of their ports, and their self test."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator

from primus.preflight.checks.ports import format_port_name, list_counted_ports
from primus.preflight.findings.finding import CheckFinding
from primus.preflight.findings.node import PreflightNode, format_names
from primus.preflight.findings.rules import About, judge, report_info

COUNTERS = ("symbol_error", "link_error_recovery", "link_downed", "port_rcv_errors", "VL15_dropped")
HARDWARE_COUNTERS = ("out_of_sequence", "packet_seq_err", "local_ack_timeout_err", "rnr_nak_retry_err")
"""Files in counters/ and hw_counters/ that increase with a bad cable or switch (kernel ABI sysfs-class-infiniband)."""
STATISTIC = re.compile(r"^\s*(\S+): (\d+)$", re.MULTILINE)
ERROR = re.compile(r"discard|crc_err|symbol_err|fcs|pause_storm")
PAUSE = re.compile(r"prio\d+_pause$|pripause|pfc_(ena_frames|frames)")
"""Names of `ethtool -S` by driver: mlx5_core (rx_prio3_pause, rx_discards_phy, rx_crc_errors_phy), bnxt_en
(rx_pfc_ena_frames_pri3, rx_fcs_err_frames), ionic (frames_rx_pripause, frames_rx_bad_fcs)."""
STATISTICS_LIMIT_S = 2.0
SELF_TEST_LIMIT_S = 15.0
WATCH_S = 1.0

Counters = dict[str, dict[str, int]]
"""Counters by port or interface, and name."""


def read_counters(node: PreflightNode) -> Counters:
    """Counters of the RDMA ports in use since they came up, and of their interfaces."""
    found: Counters = {}
    for device, port in list_counted_ports(node)[0]:
        folder = f"sys/class/infiniband/{device.name}/ports/{port.number}"
        paths = [f"counters/{name}" for name in COUNTERS] + [f"hw_counters/{name}" for name in HARDWARE_COUNTERS]
        read = {path.partition("/")[2]: node.tree.read_number(f"{folder}/{path}") for path in paths}
        found[format_port_name(device, port)] = {name: value for name, value in read.items() if value is not None}
    for interface in _list_interfaces(node):
        answer = node.run_program(["ethtool", "-S", interface], STATISTICS_LIMIT_S)
        # A missing or hung ethtool is the same for every interface: another call would only cost its limit again.
        if answer.state in ("missing", "slow"):
            break
        found[interface] = parse_statistics(answer.text)
    return found


def _list_interfaces(node: PreflightNode) -> list[str]:
    """Interfaces of the Ethernet ports in use, on the running machine only."""
    # ethtool asks the running kernel, which knows nothing of a recorded machine.
    if not node.tree.is_live:
        return []
    ports = (pair for pair in list_counted_ports(node)[0] if pair[1].link_layer == "Ethernet")
    return list(dict.fromkeys(device.interface for device, _ in ports if device.interface))


def parse_statistics(said: str) -> dict[str, int]:
    """The error and pause counters in the output of ``ethtool -S``."""
    return {name: int(count) for name, count in STATISTIC.findall(said) if ERROR.search(name) or PAUSE.search(name)}


def find_grown_counters(before: Counters, after: Counters, *, is_loaded: bool = False) -> Iterator[CheckFinding]:
    """Errors counted between two readings; pauses as well, unless `is_loaded`: a busy network pauses normally."""
    for subject, counts in after.items():
        growth = {
            name: count - before.get(subject, {}).get(name, 0)
            for name, count in counts.items()
            if not (is_loaded and PAUSE.search(name))
        }
        rising = [f"{name} +{count}" for name, count in growth.items() if count > 0]
        totals = [f"{name} {count}" for name, count in counts.items() if count]
        if counts:
            shown = format_names(rising or totals) or "none"
            yield judge("network.errors", not rising, shown, About(subject))


def check_errors(node: PreflightNode) -> Iterator[CheckFinding]:
    """Errors and pauses that ports count within `WATCH_S` without load."""
    before = read_counters(node)
    if any(before.values()) and node.tree.is_live:
        # Totals since boot include link training and cable work before the job, so only growth within this second
        # counts.
        time.sleep(WATCH_S)
        yield from find_grown_counters(before, read_counters(node))
    else:
        yield from find_grown_counters(before, before)


def check_self_test(node: PreflightNode) -> Iterator[CheckFinding]:
    """Self test of the NICs that does not interrupt traffic; requires root."""
    names = _list_interfaces(node)
    if names and not node.is_root:
        yield report_info("network.self_test", f"not run on {format_names(names)}", "only root may")
        return
    for name in names:
        answer = node.run_program(["ethtool", "-t", name, "online"], SELF_TEST_LIMIT_S)
        if answer.state == "missing":
            yield report_info("network.self_test", answer.problem)
            return
        yield judge_self_test(name, answer.text, answer.problem)
        # A driver that hangs in one self test is not asked for the next NIC.
        if answer.state == "slow":
            return


def judge_self_test(interface: str, said: str, problem: str) -> CheckFinding:
    """Finding for the output of ``ethtool -t``; many drivers do not support a test."""
    result = re.search(r"test result is (PASS|FAIL)", said)
    if result is None:
        return report_info("network.self_test", problem or "the driver has no self test", about=About(interface))
    failed = [name.strip() for name, value in re.findall(r"^(.+?)\s+(-?\d+)\s*$", said, re.MULTILINE) if value != "0"]
    shown = f"{result[1]}{f': {format_names(failed)}' if failed else ''}"
    return judge("network.self_test", result[1] == "PASS", shown, About(interface))


CHECKS = (check_errors, check_self_test)
