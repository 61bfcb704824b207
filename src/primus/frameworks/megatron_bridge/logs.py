"""Lines of Megatron-Bridge: those of Megatron-LM, and `Step Time` of the first rank before or behind them.

Source: training/utils/train_utils.py of NVIDIA-NeMo/Megatron-Bridge. `GPU utilization` is in TFLOP/s.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import TYPE_CHECKING, ClassVar

from primus.frameworks.megatron.logs import MegatronReader
from primus.training_logs.log_step import LogStep

if TYPE_CHECKING:
    from primus.training_logs.line_columns import ScannedBlock

STEP_TIME = re.compile(rb"Step Time : *([\d.]+)s +GPU utilization: *([\d.]+)")
MEMORY = re.compile(rb"mem-max-reserved-gigabytes: *([\d.]+)")
SAME_TIME_S = 0.006
"""The time is printed with two decimals."""
GB_IN_GIB = 1e9 / (1 << 30)


class MegatronBridgeReader(MegatronReader):
    """Megatron-Bridge."""

    NAME = "megatron-bridge"
    TITLE = "Megatron-Bridge"
    PRECEDENCE = 2
    ANCHORS: ClassVar[tuple[bytes, ...]] = (b"iteration ", b"Step Time : ", b"mem-max-reserved-gigabytes")
    MEMORY = "most that PyTorch had reserved"

    def __init__(self) -> None:
        super().__init__()
        self._waiting: LogStep | None = None
        """Last step, which the line behind it may complete."""
        self._times: tuple[float, float] | None = None
        """Time and TFLOP/s of a line whose step has not been read."""
        self._memory_gib: float | None = None

    @classmethod
    def recognizes(cls, line: bytes) -> bool:
        return STEP_TIME.search(line) is not None

    def read_line(self, line: bytes) -> Iterable[LogStep]:
        memory = MEMORY.search(line)
        if memory:
            self._memory_gib = float(memory[1]) * GB_IN_GIB
        times = STEP_TIME.search(line)
        if times:
            self._times = float(times[1]), float(times[2])
            self._complete_waiting()
        for found in super().read_line(line) if b"iteration " in line else ():
            if type(found) is not LogStep:
                yield found
                continue
            yield from self.finish()
            self._waiting = found
            self._complete_waiting()

    def scan_block(self, block: bytes) -> ScannedBlock | None:
        return None  # a line may complete the one before it

    def finish(self) -> Iterable[LogStep]:
        if self._waiting is not None:
            yield self._waiting
        self._waiting = None

    def _complete_waiting(self) -> None:
        step, times = self._waiting, self._times
        if step is None or times is None or abs(step.values["step_time_s"] - times[0]) > SAME_TIME_S:
            return
        step.values["tflops_per_device"] = times[1]
        if self._memory_gib is not None:
            step.values["memory_gib"] = self._memory_gib
        self._times = None


READER = MegatronBridgeReader
