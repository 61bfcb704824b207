"""The devices that PyTorch sees, queried in a separate process: their number, and peer access between them."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence

import msgspec
from msgspec import Struct

from primus import interpreter
from primus.machine import devices as visible
from primus.preflight.findings.finding import CheckFinding
from primus.preflight.findings.node import PreflightNode, format_names
from primus.preflight.findings.rules import report_info

LIMIT_S = 60.0
"""PyTorch starts in 10 to 15 s on a node with 8 devices, and more slowly from a network file system."""
USUAL_DEVICES = 8
DEVICE_LIMIT_S = 1.0
"""Added for each further device, such as the 64 partitions of a node in CPX mode."""
PROGRAM = """\
import json, torch
n = torch.cuda.device_count() if torch.cuda.is_available() else 0
pairs = [(a, b) for a in range(n) for b in range(n) if a != b]
print(json.dumps({"count": n, "apart": [pair for pair in pairs if not torch.cuda.can_device_access_peer(*pair)]}))
"""


class TorchDeviceView(Struct, frozen=True):
    """Output of the process."""

    count: int
    apart: tuple[tuple[int, int], ...] = ()
    """Pairs of devices where the first cannot access the second's memory."""


def compute_limit_s(node: PreflightNode) -> float:
    """Time limit of PyTorch for the devices of a node, in seconds."""
    return LIMIT_S + DEVICE_LIMIT_S * max(0, len(node.facts.partitions) - USUAL_DEVICES)


def check_torch_devices(node: PreflightNode, python: str = sys.executable) -> Iterator[CheckFinding]:
    """PyTorch sees the devices of the driver, and devices of one hive can access each other's memory."""
    if not node.has_devices or not node.tree.is_live:
        return
    expected = len(visible.list_usable_devices(node.facts, node.environ)) + _count_failed_devices(node)
    # A separate process: this one does not import torch, a CUDA context would stay open during the measurements,
    # and run_program can kill a process whose driver call hangs.
    answer = node.run_program(interpreter.build_code_command(python, PROGRAM), compute_limit_s(node))
    if "No module named 'torch'" in answer.problem:
        yield report_info("gpu.torch_count", "PyTorch is not installed here")
        return
    try:
        view = msgspec.json.decode(answer.text.strip().rpartition("\n")[2], type=TorchDeviceView)
    except msgspec.MsgspecError:
        yield node.judge("gpu.torch_count/no_answer", False, answer.problem or "no answer", wanted=expected)
        return
    yield node.judge("gpu.torch_count", view.count == expected, str(view.count), wanted=expected)
    if view.count > 1:
        yield judge_peers(node, view)


def _count_failed_devices(node: PreflightNode) -> int:
    """Devices that PyTorch would see if they had not failed; a selection by variables may leave them out."""
    if any(name in node.environ for name in (*visible.AMD_VISIBLE, *visible.NVIDIA_VISIBLE)):
        return 0
    return sum(device.failure is not None and not device.partitions for device in node.facts.devices)


def judge_peers(node: PreflightNode, view: TorchDeviceView) -> CheckFinding:
    """Whether devices of one hive can access each other's memory."""
    hives = _list_hives(node, view.count)
    if hives is None:
        shown = f"{len(view.apart)} pairs have no peer access" if view.apart else "every pair"
        return node.judge("gpu.peer_access/unknown", False, shown)
    apart = [f"{first}-{second}" for first, second in view.apart if hives[first] == hives[second]]
    return node.judge("gpu.peer_access", not apart, format_names(apart), value=len(apart))


def _list_hives(node: PreflightNode, count: int) -> Sequence[str] | None:
    """The hive of each device that PyTorch sees; None if there is none, or PyTorch and the driver list different
    devices."""
    linked = [device for device, profile in node.list_profiles if (profile.hive_size or 1) > 1]
    hives = {part: device.hive or device.vendor for device in linked for part in device.partitions}
    used = visible.list_usable_devices(node.facts, node.environ)
    is_known = len(used) == count and all(part in hives for part in used)
    return [hives[part] for part in used] if is_known else None
