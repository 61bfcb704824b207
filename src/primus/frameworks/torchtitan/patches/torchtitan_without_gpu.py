"""torchtitan trains on a machine without a GPU: torch names its device `cpu`, and answers questions about its memory.

torchtitan/tools/utils.py reads the device type when it is imported, and takes `cuda` where torch finds no accelerator;
`DeviceMemoryMonitor` of torchtitan/components/metrics.py calls functions that `torch.cpu` does not have.
"""

from __future__ import annotations

import os
from datetime import date
from types import SimpleNamespace
from typing import Any

from primus.patch import Patch

PATCH = Patch(
    target="torchtitan",
    module="torchtitan",
    versions=">=0.3,<0.4",
    reason="torchtitan takes the device for a CUDA GPU where there is none, and reads its memory",
    link="https://github.com/pytorch/torchtitan/blob/main/torchtitan/tools/utils.py",
    expires=date(2027, 6, 30),
    backend="torchtitan",
)


def apply() -> None:
    """Complete the answers of torch; torchtitan is not imported, so that its own errors are reported as such."""
    import torch._utils

    device_names: Any = torch._utils
    find_device_type = device_names._get_available_device_type
    device_names._get_available_device_type = lambda: find_device_type() or "cpu"
    host: Any = torch.cpu
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    answers = {
        "empty_cache": lambda: None,
        "get_device_name": lambda device=None: "cpu",
        "get_device_properties": lambda device=None: SimpleNamespace(total_memory=memory),
        # Without entries torchtitan reports -1; primus reports the memory of processes itself.
        "memory_stats": lambda device=None: {},
        "reset_peak_memory_stats": lambda device=None: None,
    }
    for name, answer in answers.items():
        if not hasattr(host, name):
            setattr(host, name, answer)
