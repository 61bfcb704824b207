"""What PyTorch sees of the devices, asked in a process of its own: their number, and which reach each other."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence

import msgspec
from msgspec import Struct

from primus import interpreter
from primus.machine import devices as visible
from primus.preflight.finding import Finding
from primus.preflight.node import Node, info, judged, listed

LIMIT_S = 60.0
"""Starting PyTorch on a node of 8 devices takes 10 to 15 s, more where its files are on a network file system."""
USUAL_DEVICES = 8
DEVICE_LIMIT_S = 1.0
"""For each further device, such as the 64 partitions of a node in CPX mode."""
REASON = "ranks take their devices from PyTorch"
ADVICE = "is PyTorch built for this driver (see software.torch), and may this user open /dev/kfd and /dev/dri?"
PROGRAM = """\
import json, torch
n = torch.cuda.device_count() if torch.cuda.is_available() else 0
pairs = [(a, b) for a in range(n) for b in range(n) if a != b]
print(json.dumps({"count": n, "apart": [pair for pair in pairs if not torch.cuda.can_device_access_peer(*pair)]}))
"""


class View(Struct, frozen=True):
    """What the process prints."""

    count: int
    apart: tuple[tuple[int, int], ...] = ()
    """Pairs of devices of which the first cannot reach the second's memory."""


def limit_s(node: Node) -> float:
    """Seconds that PyTorch has to look at the devices of a node."""
    return LIMIT_S + DEVICE_LIMIT_S * max(0, len(node.facts.partitions) - USUAL_DEVICES)


def seen(node: Node, python: str = sys.executable) -> Iterator[Finding]:
    """PyTorch sees the devices that the driver shows, and those of one hive reach each other."""
    if not node.has_devices or not node.tree.is_live:
        return
    expected = len(visible.usable(node.facts, node.environ))
    answer = node.call(interpreter.code_command(python, PROGRAM), limit_s(node))
    if "No module named 'torch'" in answer.problem:
        yield info("gpu.torch_count", "PyTorch is not installed here")
        return
    try:
        view = msgspec.json.decode(answer.text.strip().rpartition("\n")[2], type=View)
    except msgspec.MsgspecError:
        problem, advice = answer.problem or "no answer", "run `python -c 'import torch; torch.cuda.init()'`"
        yield judged(False, "fail", "gpu.torch_count", problem, str(expected), REASON, advice)
        return
    yield judged(view.count == expected, "fail", "gpu.torch_count", str(view.count), str(expected), REASON, ADVICE)
    if view.count > 1:
        yield peers(node, view)


def peers(node: Node, view: View) -> Finding:
    """Whether devices of one hive reach each other's memory."""
    hives = _hives(node, view.count)
    reason = "collectives inside a node copy from device to device"
    if hives is None:
        shown = f"{len(view.apart)} pairs do not reach each other" if view.apart else "every pair"
        return info("gpu.peer_access", shown, reason)
    apart = [f"{first}-{second}" for first, second in view.apart if hives[first] == hives[second]]
    return judged(
        not apart,
        "fail",
        "gpu.peer_access",
        f"none between {listed(apart)}" if apart else "between all devices of a hive",
        "between all devices of a hive",
        reason,
        "boot with iommu=pt, switch PCIe ACS off; `nvidia-smi topo -p2p r` or `amd-smi topology` shows the pairs",
        value=len(apart),
    )


def _hives(node: Node, count: int) -> Sequence[str] | None:
    """The hive of each device that PyTorch sees; None where there is none, or it sees other devices than the driver."""
    linked = [device for device, profile in node.profiles if (profile.hive_size or 1) > 1]
    hives = {part: device.hive or device.vendor for device in linked for part in device.partitions}
    used = visible.usable(node.facts, node.environ)
    is_known = len(used) == count and all(part in hives for part in used)
    return [hives[part] for part in used] if is_known else None
