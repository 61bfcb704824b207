"""megatron-core writes a checkpoint without starting a server process for the results.

Its writers report over a queue of a `multiprocessing.Manager`, for writers that outlive the call. Where the call waits
for the writers, as here, a queue inside the process does the same. The server takes seconds to start, and keeps
running if the process that started it is killed.
"""

from __future__ import annotations

import queue
from datetime import date

from primus.patch import Patch

PATCH = Patch(
    target="megatron-core",
    module="megatron.core",
    versions=">=0.16,<0.20",
    reason="each process starts a server process for the results of its writers",
    link="https://github.com/NVIDIA/Megatron-LM/blob/core_v0.16.1/megatron/core/dist_checkpointing/strategies/filesystem_async.py#L51",
    expires=date(2027, 6, 30),
    backend=("megatron", "megatron_bridge"),
)


def apply() -> None:
    """Put a queue of this process where megatron-core keeps its own after the first checkpoint."""
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    if filesystem_async._results_queue is None:
        filesystem_async._results_queue = queue.Queue()
