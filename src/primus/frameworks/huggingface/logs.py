"""Records of the Hugging Face Trainer: `{'loss': 1.26, 'learning_rate': 6.3e-06, 'epoch': 0.03}`, and its progress bar.

Source: `Trainer.log` and ProgressCallback of huggingface/transformers; version 5 prints the values as strings. Records
rarely have a step. Without one, it is the number of the record times the interval between records that the progress
bar shows, and the steps before the first record, which a resumed run has. Without a bar, the epochs show whether
records before the first one are missing, as in a log whose beginning is cut off. ms-swift and the `trainer_log.jsonl`
of LLaMA-Factory have steps and the time since the start.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from statistics import median
from typing import Any, NamedTuple

import msgspec

from primus.training_logs.line_values import (
    NUMBER,
    BarPosition,
    LogLineError,
    find_bar,
    parse_duration,
    parse_number,
    parse_time_stamp,
)
from primus.training_logs.log_step import LogStep
from primus.training_logs.step_reader import LogEvaluation, StepReader

RECORD = re.compile(rb"\{[^{}]*['\"](?:eval_)?(?:loss|train_runtime)['\"]:[^{}]*\}")
PAIR = re.compile(rb"['\"]([\w/() ]+)['\"]: *['\"]?([-+.\w]+(?:,\d+)?)")
ELAPSED = re.compile(
    rb"['\"]elapsed_time['\"]: *['\"](?:(\d+) ?d(?:ays?)?,? *)?(?:(\d+)h *)?(?:(\d+)m *)?(?:(\d+)s|(\d[\d:]+))"
)
FIELDS = {
    "loss": "loss",
    "grad_norm": "grad_norm",
    "learning_rate": "learning_rate",
    "lr": "learning_rate",
    "aux_loss": "load_balancing_loss",
    "tokens_per_second_per_gpu": "tokens_per_s_per_device",
    "tokens/train_per_sec_per_gpu": "tokens_per_s_per_device",
    "num_input_tokens_seen": "consumed_tokens",
    "num_tokens": "consumed_tokens",
    "total_tokens": "consumed_tokens",
    "tokens/total": "consumed_tokens",
    "memory(GiB)": "memory_gib",
    "memory/device_mem_reserved(gib)": "memory_gib",
    "memory/device_mem_reserved (GiB)": "memory_gib",
    "memory/device_reserved (GiB)": "memory_gib",
}
"""Those with a unit in brackets are of ms-swift and Axolotl."""
CALLBACK = re.compile(rb"callbacks(?:\.py)?:\d+\D.*>> $")
"""What stands before a record of LLaMA-Factory's callback, which repeats that of the Trainer with fewer digits."""
STEPS = ("step", "global_step/max_steps", "current_steps")
MAX_INTERVALS = 1000


class EpochRange(NamedTuple):
    """A printed epoch, which is rounded to its last digit."""

    low: float
    value: float
    high: float

    @classmethod
    def parse(cls, text: str) -> EpochRange:
        """The epochs that are printed as `text`."""
        half = 0.5 * 10.0 ** -len(text.partition(".")[2].partition("e")[0])
        return cls(float(text) - half, float(text), float(text) + half)


class HuggingFaceReader(StepReader):
    """The Hugging Face Trainer, and trainers on it (TRL, LLaMA-Factory, axolotl)."""

    NAME = "huggingface"
    TITLE = "Hugging Face Trainer"
    ANCHORS = (b"loss':", b'loss":', b"train_runtime", b"it/s", b"s/it")
    END = re.compile(rb"\}\s*$")
    PRECEDENCE = -1
    FILE = "trainer_state.json"
    """In each checkpoint; has all records in `log_history`."""

    def __init__(self) -> None:
        super().__init__()
        self._num_records = 0
        self._epoch = 0.0
        self._bar: BarPosition | None = None
        """Step and time of the newest progress bar."""
        self._record_bar: int | None = None
        """Step of the bar at the last record."""
        self._intervals: list[int] = []
        self._places: list[tuple[int, int]] = []
        """Number of a record, and step of the bar then."""
        self._epochs: list[tuple[int, EpochRange]] = []
        """Numbers of the first and the last record that was counted, and their epochs."""
        self._last_record = (False, math.nan, math.nan)
        """Whether the last record was of LLaMA-Factory's callback, its loss and its epoch."""

    @classmethod
    def recognizes(cls, line: bytes) -> bool:
        return RECORD.search(line) is not None

    @property
    def step_factor(self) -> float:
        """Steps of one record, if records are counted."""
        return float(median(self._intervals)) if self._intervals else 1.0

    @property
    def step_offset(self) -> float:
        """Steps before the first record, if records are counted; a bar may be drawn a little before its step."""
        factor = self.step_factor
        distances = [bar - factor * number for number, bar in self._places]
        return factor * round(median(distances) / factor) if distances else self._estimate_missing_records()[1]

    @property
    def step_note(self) -> str:
        if not self._epochs or self._places:
            return ""
        fewest, likely, most = self._estimate_missing_records()
        if not likely:
            return "the log has no steps: its records are counted, from 1"
        number = f"about {likely:.0f}" if fewest != most else f"{likely:.0f}"
        return f"the log has no steps: its records are counted; by its epochs {number} before the first one are missing"

    def _estimate_missing_records(self) -> tuple[float, float, float]:
        """Fewest, likely and most records before the first one, by the epochs of the first and the last."""
        if len(self._epochs) < 2:
            return 0.0, 0.0, 0.0
        (first, begin), (last, end) = self._epochs
        width = end.high - begin.low, end.value - begin.value, end.low - begin.high
        if width[2] <= 0:
            return 0.0, 0.0, 0.0
        ratios = [epoch * (last - first) / size for epoch, size in zip(begin, width, strict=True)]
        fewest, likely, most = (max(0, round(ratio) - first) for ratio in ratios)
        # A log that may be complete is taken as complete.
        return (fewest, likely, most) if fewest else (0.0, 0.0, 0.0)

    def read_line(self, line: bytes) -> Iterable[LogStep]:
        self._bar = find_bar(line) or self._bar
        records = list(RECORD.finditer(line))
        for found in records:
            yield from self._read_record(found[0], line[: found.start()])
        if not records and re.search(rb"\{['\"]loss['\"]: ", line):
            raise LogLineError("a record that is cut off")

    def _read_record(self, text: bytes, prefix: bytes) -> Iterable[LogStep]:
        texts = {name.decode(): value for name, value in PAIR.findall(text)}
        wrong = next((value for value in texts.values() if b"," in value), None)
        if wrong is not None:  # Python and JSON have no separator of thousands
            raise LogLineError(f"{wrong.decode()}: a decimal comma")
        numbers = {name: parse_number(value) for name, value in texts.items() if NUMBER.search(value)}
        if "train_runtime" in numbers:
            self.settings |= {name: texts[name].decode() for name in numbers}
            return
        steps = [numbers[name] for name in STEPS if name in numbers]
        step = steps[0] if steps else float(self._num_records)
        if "eval_loss" in numbers:
            yield LogEvaluation({"step": step, "loss": numbers["eval_loss"]})
        if "loss" not in numbers or self._repeats_last(numbers, CALLBACK.search(prefix) is not None):
            return
        if not steps:
            step = self._count_record(numbers.get("epoch", math.nan))
            if math.isfinite(numbers.get("epoch", math.nan)):
                self._epochs = [*self._epochs[:1], (self._num_records, EpochRange.parse(texts["epoch"].decode()))]
        values = {FIELDS[name]: value for name, value in numbers.items() if name in FIELDS}
        elapsed = ELAPSED.search(text)
        time_s = _parse_elapsed(elapsed) if elapsed else self._bar.time_s if self._bar else parse_time_stamp(prefix)
        yield LogStep({"step": step, **values}, time_s=time_s)

    @classmethod
    def read_file(cls, data: bytes) -> list[LogStep]:
        """The steps and evaluations of a `trainer_state.json`.

        Raises:
            LogLineError: It is another file.
        """
        try:
            records = msgspec.json.decode(data, type=dict[str, Any])["log_history"]
            found: list[LogStep] = []
            for record in records:
                step = float(record["step"])
                if "eval_loss" in record:
                    found.append(LogEvaluation({"step": step, "loss": float(record["eval_loss"])}))
                if "loss" in record:
                    values = {FIELDS[name]: float(value) for name, value in record.items() if name in FIELDS}
                    found.append(LogStep({"step": step, **values}))
            return found
        except (msgspec.DecodeError, KeyError, TypeError, ValueError) as error:
            raise LogLineError(f"not the state of a trainer: {error}") from None

    def _repeats_last(self, numbers: Mapping[str, float], is_of_callback: bool) -> bool:
        """Whether a record is the last one again, from the other of the Trainer and LLaMA-Factory's callback."""
        loss, epoch = numbers["loss"], numbers.get("epoch", math.nan)
        was_of_callback, last_loss, last_epoch = self._last_record
        self._last_record = (is_of_callback, loss, epoch)
        is_same = abs(loss - last_loss) < 1e-4 and abs(epoch - last_epoch) < 0.01
        return is_same and is_of_callback != was_of_callback

    def _count_record(self, epoch: float) -> float:
        if epoch < self._epoch:
            # A restart: its records continue at the epoch of the checkpoint.
            self._num_records = max(0, round(epoch / self._epoch * self._num_records) - 1)
            self._record_bar = None
        self._epoch = epoch if math.isfinite(epoch) else self._epoch
        self._num_records += 1
        if self._bar and self._record_bar is not None and self._bar.step - self._record_bar > 0:
            self._intervals = [*self._intervals, self._bar.step - self._record_bar][-MAX_INTERVALS:]
        self._record_bar = self._bar.step if self._bar else None
        if self._record_bar is not None:
            self._places = [*self._places, (self._num_records, self._record_bar)][-MAX_INTERVALS:]
        return float(self._num_records)


def _parse_elapsed(found: re.Match[bytes]) -> float:
    days, hours, minutes, seconds = (int(group or 0) for group in found.groups()[:4])
    return 86400 * days + 3600 * hours + 60 * minutes + seconds + (parse_duration(found[5]) if found[5] else 0.0)


READER = HuggingFaceReader
