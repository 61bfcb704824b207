"""Lines of MLPerf Training: `:::MLLOG {...}`, one JSON object each.

Source: mlperf_logging/mllog of mlcommons/logging, and the rules of its compliance checker. Steps are samples divided by
the global batch size.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from typing import Any

import msgspec

from primus.training_logs.line_values import LogLineError, set_value
from primus.training_logs.log_step import LogStep
from primus.training_logs.step_reader import LogEvaluation, StepReader

TOKEN = b":::MLLOG "
TIME_TO_TRAIN = "time_to_train_s"
"""Setting with the seconds from `run_start` to `run_stop` of a run that reached its target: MLPerf's score."""
STATISTICS = {
    "throughput": "samples_per_s",
    "train_step_time": "step_time_s",
    "reduced_train_loss": "loss",
    "train_loss": "loss",
}


class MlperfLine(msgspec.Struct):
    """One line; `metadata` has `samples_count`, `step` or `epoch_num`."""

    key: str
    time_ms: float
    event_type: str = "POINT_IN_TIME"
    value: Any = None
    metadata: dict[str, object] = {}

    def find_number(self, *names: str) -> float | None:
        """The first of these fields of the metadata that is a number."""
        values = map(self.metadata.get, names)
        return next((float(value) for value in values if isinstance(value, (int, float))), None)

    def count_samples(self) -> float:
        """Samples that the run has consumed.

        Raises:
            LogLineError: The line does not state it.
        """
        number = self.find_number("samples_count", "step", "epoch_num")
        if number is None:
            raise LogLineError(f"{self.key} without samples_count")
        return number


def read_mlperf_line(line: bytes) -> MlperfLine:
    """The line behind its token.

    Raises:
        LogLineError: It is not JSON, or lacks a field.
    """
    try:
        # Other processes may have written behind the object.
        text = line[line.rindex(TOKEN) + len(TOKEN) :]
        return msgspec.json.decode(text[: text.rindex(b"}") + 1], type=MlperfLine)
    except (ValueError, msgspec.DecodeError) as error:
        raise LogLineError(str(error)) from None


class MlperfReader(StepReader):
    """MLPerf."""

    NAME = "mlperf"
    TITLE = "MLPerf"
    PRECEDENCE = -2
    ANCHORS = (TOKEN,)
    END = re.compile(rb"\}\s*$")

    def __init__(self) -> None:
        super().__init__()
        self._batch_size = math.nan

    def read_line(self, line: bytes) -> Iterable[LogStep]:
        found = read_mlperf_line(line)
        if found.key == "tracked_stats" and isinstance(found.value, dict):
            values = {
                STATISTICS[name]: float(value)
                for name, value in found.value.items()
                if name in STATISTICS and isinstance(value, (int, float))
            }
            # Others are of steps of an evaluation, or the mean time of a block, whose samples count from its start.
            if values.keys() & {"samples_per_s", "loss"}:
                samples = found.count_samples()
                yield LogStep({"step": self._to_step(samples), "consumed_samples": samples, **values})
        elif found.key == "train_loss" and isinstance(found.value, (int, float)) and "samples_count" in found.metadata:
            samples = found.count_samples()
            values = {"step": self._to_step(samples), "consumed_samples": samples, "loss": float(found.value)}
            set_value(values, "learning_rate", found.find_number("lr"))
            yield LogStep(values)
        elif found.key in ("eval_accuracy", "eval_error") and isinstance(found.value, (int, float)):
            yield LogEvaluation({"step": self._to_step(found.count_samples()), "loss": float(found.value)})
        elif found.key == "run_stop":
            self.settings["status"] = str(found.metadata.get("status"))
            self.settings["run_stop_ms"] = str(found.time_ms)
            if "run_start_ms" in self.settings and self.settings["status"] == "success":
                passed_ms = found.time_ms - float(self.settings["run_start_ms"])
                self.settings[TIME_TO_TRAIN] = str(passed_ms / 1000)
        elif found.key == "run_start":
            self.settings["run_start_ms"] = str(found.time_ms)
        elif found.event_type == "POINT_IN_TIME" and isinstance(found.value, (int, float, str)):
            self.settings[found.key] = str(found.value)
            if found.key == "global_batch_size":
                self._batch_size = float(found.value)

    def _to_step(self, samples: float) -> float:
        return samples / self._batch_size if self._batch_size > 0 else samples
