"""Lines of NeMo: `Training epoch 0, iteration 17/99 | lr: ...`, progress bars of NeMo 1, and records of DLLogger.

Steps count from 0.


Source: the progress printer of NVIDIA NeMo 2 (nemo/utils/callbacks). It prints no throughput.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable

from primus.training_logs.line_values import LogLineError, parse_number
from primus.training_logs.log_step import LogStep
from primus.training_logs.step_reader import StepReader

LINE = re.compile(rb"Training epoch \d+, iteration (\d+)/\d+ \|(.*)")
RECORD = re.compile(rb"\bDLLL (\{.*\})\s*$")
"""NVIDIA/dllogger, JSONStreamBackend."""
BAR = re.compile(rb"\breduced_train_loss=")
FIELDS = {
    b"lr": "learning_rate",
    b"global_batch_size": "global_batch_size",
    b"reduced_train_loss": "loss",
    b"train_step_timing in s": "step_time_s",
    b"train_step_timing": "step_time_s",
    b"consumed_samples": "consumed_samples",
    b"grad_norm": "grad_norm",
    b"tokens_per_sec_per_gpu": "tokens_per_s_per_device",
    b"TFLOPS_per_GPU": "tflops_per_device",
}


class NeMoReader(StepReader):
    """NeMo."""

    NAME = "nemo"
    TITLE = "NeMo"
    ANCHORS = (b"reduced_train_loss",)

    def read_line(self, line: bytes) -> Iterable[LogStep]:
        found = LINE.search(line)
        if found:
            pairs = [part.partition(b": ")[::2] for part in found[2].split(b"|")]
        elif record := RECORD.search(line):
            pairs = _list_record_pairs(record[1])
        elif BAR.search(line):
            pairs = [part.partition(b"=")[::2] for part in line.rpartition(b"[")[2].rstrip(b"] \r").split(b", ")]
        else:
            return
        texts = {name.strip(): text for name, text in pairs}
        values = {field: parse_number(texts[name]) for name, field in FIELDS.items() if name in texts}
        if "loss" not in values:
            raise LogLineError("no loss")
        step = parse_number(texts[b"global_step"]) if b"global_step" in texts else found and float(found[1])
        if step is None:
            raise LogLineError("no step")
        yield LogStep({"step": step + 1, **values})


def _list_record_pairs(text: bytes) -> list[tuple[bytes, ...]]:
    """The names and values of a record of DLLogger."""
    try:
        data = json.loads(text)["data"]
        return [(name.encode(), str(value).encode()) for name, value in data.items()]
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise LogLineError("a record that is damaged") from error


READER = NeMoReader
