"""torchtitan trains on a machine without a GPU: it names the device `cpu`, and its monitor of GPU memory reads nothing.

torchtitan/tools/utils.py reads the device type when it is imported, and takes `cuda` where torch finds no accelerator;
`DeviceMemoryMonitor` of torchtitan/components/metrics.py calls functions that `torch.cpu` does not have.
"""

from __future__ import annotations

from datetime import date
from typing import Any

from primus.patch import Patch

PATCH = Patch(
    target="torchtitan",
    versions=">=0.3,<0.4",
    reason="torchtitan takes the device for a CUDA GPU where there is none, and reads its memory",
    link="https://github.com/pytorch/torchtitan/blob/main/torchtitan/tools/utils.py",
    expires=date(2027, 6, 30),
    backend="torchtitan",
)


def apply() -> None:
    """Complete torch's answer, and replace the monitor if the answer is `cpu`."""
    import torch._utils

    device_names: Any = torch._utils
    find_device_type = device_names._get_available_device_type
    device_names._get_available_device_type = lambda: find_device_type() or "cpu"
    from torchtitan.components import metrics
    from torchtitan.tools import utils

    if utils.device_type == "cpu":
        metrics.build_device_memory_monitor = lambda: HostMemoryMonitor(metrics.DeviceMemStats)


class HostMemoryMonitor:
    """Answers as torchtitan's monitor of GPU memory, with zeros.

    Args:
        stats: torchtitan's tuple of numbers.
    """

    device_name = "cpu"
    device_capacity_gib = 0.0

    def __init__(self, stats: Any) -> None:
        self._stats = stats

    def get_peak_stats(self) -> Any:
        """Zeros; primus reports the memory of processes itself."""
        return self._stats(*[0] * len(self._stats._fields))

    def reset_peak_stats(self) -> None:
        """Nothing to reset."""
