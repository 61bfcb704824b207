"""Blocks of OLMo-core: `[step=100/2000,epoch=1,eta=5h11m]`, and a line `    name=value` for each value.

Source: src/olmo_core/train/callbacks/console_logger.py, speed_monitor.py and gpu_memory_monitor.py of
allenai/OLMo-core. The time of a step is the inverse of its batches per second. Rates and shares of the peak are those
of the step, not the averages beside them; shares are in percent.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from primus.training_logs.line_values import NUMBER, parse_number, parse_rank, parse_time_stamp
from primus.training_logs.log_step import LogStep
from primus.training_logs.step_reader import StepReader

HEADER = re.compile(rb"\[step=(\d+)/[\d?,]+,epoch=\d+")
VALUE = re.compile(rb"\b((?:train|optim|throughput|gpu_memory)/[^=]+)=(\S+)\s*$")
FIELDS = {
    b"train/CE loss": ("loss", 1.0),
    b"train/load balancing loss": ("load_balancing_loss", 1.0),
    b"train/router Z loss": ("router_z_loss", 1.0),
    b"optim/total grad norm": ("grad_norm", 1.0),
    b"optim/step skipped": ("num_skipped", 1.0),
    b"throughput/total tokens": ("consumed_tokens", 1.0),
    b"throughput/device/TPS": ("tokens_per_s_per_device", 1.0),
    b"throughput/device/TFLOPs_per_GPU": ("tflops_per_device", 1.0),
    b"throughput/device/MFU": ("mfu", 0.01),
    b"gpu_memory/GPU reserved mem (GiB)": ("memory_gib", 1.0),
}
BATCHES_PER_S = b"throughput/device/BPS"
LEARNING_RATE = re.compile(rb"optim/LR(?: \(group 0\))?")


class OlmoCoreReader(StepReader):
    """OLMo-core."""

    NAME = "olmo-core"
    TITLE = "OLMo-core"
    ANCHORS = (b"[step=", b"train/", b"optim/", b"throughput/", b"gpu_memory/")
    MEMORY = "most that PyTorch had reserved"

    def __init__(self) -> None:
        super().__init__()
        self._block: LogStep | None = None

    @classmethod
    def recognizes(cls, line: bytes) -> bool:
        return HEADER.search(line) is not None

    def read_line(self, line: bytes) -> Iterable[LogStep]:
        header = HEADER.search(line)
        if header:
            yield from self.finish()
            prefix = line[: header.start()]
            self._block = LogStep({"step": float(header[1])}, parse_rank(prefix), parse_time_stamp(prefix))
            return
        found = VALUE.search(line)
        if not found or not self._block or not NUMBER.search(found[2]):
            return
        number = parse_number(found[2])
        if found[1] in FIELDS:
            field, factor = FIELDS[found[1]]
            self._block.values[field] = number * factor
        elif found[1] == BATCHES_PER_S and number > 0:
            self._block.values["step_time_s"] = 1 / number
        elif LEARNING_RATE.fullmatch(found[1]):
            self._block.values["learning_rate"] = number

    def finish(self) -> Iterable[LogStep]:
        block, self._block = self._block, None
        # A step between two blocks of values has a header only.
        return [block] if block and len(block.values) > 1 else []


READER = OlmoCoreReader
