"""Lines of Megatron-LM and of its descendants: `name: value` between bars, after `iteration N/M`.

Source: `training_log` in megatron/training/training.py of NVIDIA/Megatron-LM. The elapsed time is the mean over the
iterations since the last line. A loss is printed only if it is at least 0: a line without one is of a step whose loss
is not a number.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import repeat
from math import fmod
from operator import floordiv
from typing import ClassVar, NamedTuple

import msgspec

from primus.training_logs.step_merger import LogStep
from primus.training_logs.step_reader import (
    NUMBER,
    LogEvaluation,
    LogLineError,
    StepReader,
    count_as_nonfinite,
    parse_number,
    parse_rank,
    parse_time_stamp,
    split_steps,
)

ITERATION = re.compile(rb"\biteration +(\d+)/ *(\d+) *\|")
VALIDATION = re.compile(rb"\bvalidation loss at iteration +(\d+)[^|]*\|[^|]*?value: *([-+.\deEnaif]+)")
ARGUMENT = re.compile(rb"^(?:\[[^\]]*\]:?)* +([a-z][\w.]*) \.{2,} ?(.*?)\s*$")
"""A row of the table of arguments at the start: `  seq_length ........ 4096`, with a prefix of torchrun or without."""
MAX_SETTINGS = 2000

SEGMENTS = {
    b"consumed samples": ("consumed_samples", 1.0),
    b"consumed tokens": ("consumed_tokens", 1.0),
    b"elapsed time per iteration (ms)": ("step_time_s", 1000.0),
    b"elapsed time per iteration(ms)": ("step_time_s", 1000.0),
    b"elapsed time per iteration (s)": ("step_time_s", 1.0),
    b"throughput per GPU (TFLOP/s/GPU)": ("tflops_per_device", 1.0),
    b"compute per GPU (TFLOP/s/GPU)": ("tflops_per_device", 1.0),
    b"compute per device (TFLOP/s, causal)": ("tflops_per_device", 1.0),
    b"approx flops per GPU": ("tflops_per_device", 1.0),
    b"TFLOPs": ("tflops_per_device", 1.0),
    b"tokens per GPU (tokens/s/GPU)": ("tokens_per_s_per_device", 1.0),
    b"tokens/s/GPU inst/harmonic mean": ("tokens_per_s_per_device", 1.0),
    b"tokens/s/device": ("tokens_per_s_per_device", 1.0),
    b"tokens/sec/gpu": ("tokens_per_s_per_device", 1.0),
    b"tokens per gpu per second (tgs)": ("tokens_per_s_per_device", 1.0),
    b"samples per second": ("samples_per_s", 1.0),
    b"learning rate": ("learning_rate", 1.0),
    b"global batch size": ("global_batch_size", 1.0),
    b"lm loss": ("loss", 1.0),
    b"lm_loss": ("loss", 1.0),
    b"loss": ("loss", 1.0),
    b"grad norm": ("grad_norm", 1.0),
    b"number of skipped iterations": ("num_skipped", 1.0),
    b"energy per GPU (J/iter/GPU)": ("energy_j_per_device", 1.0),
    b"hip mem usage/free/total/usage_ratio": ("memory_gib", 1.0),
    b"rocm mem usage/free/total/usage_ratio": ("memory_gib", 1.0),
}
"""Field and divisor by the name of a segment; the first number counts, which is that of this line, not an average."""

LENGTHS = (b"actual seqlen", b"actual seq length")
"""Names of the tokens of a sample."""
SUFFIX = re.compile(rb"\d([KMBT])\b")
SUFFIXES = {b"K": 1e3, b"M": 1e6, b"B": 1e9, b"T": 1e12}
NUMERIC = b"0123456789.+-"
FEWEST_ALIKE = 16
"""Fewer lines of one layout are read one by one."""


class NumberTable(NamedTuple):
    """How the numbers of many lines become one list: separators become commas, the rest is deleted."""

    commas: bytes
    """Table of `bytes.translate`."""
    deleted: bytes
    has_pairs: bool
    """Whether `/` separates numbers; it does so in names as well, where the commas repeat."""


def _make_table(separators: bytes, *, has_pairs: bool) -> NumberTable:
    deleted = bytes(set(range(256)) - set(NUMERIC + b"E" + separators))
    return NumberTable(bytes.maketrans(separators, b"," * len(separators)), deleted, has_pairs)


PLAIN = _make_table(b":\n", has_pairs=False)
"""One number behind each colon; `iteration 12/ 500` becomes 12500."""
PAIRS = _make_table(b":/(\n", has_pairs=True)


class LineLayout(NamedTuple):
    """Where the numbers of lines of one layout are."""

    table: NumberTable
    num_numbers: int
    """In each line."""
    places: dict[str, tuple[int, float]]
    """Position and divisor by field."""
    num_iterations: int


class MegatronReader(StepReader):
    """Megatron-LM, Megatron-DeepSpeed, GPT-NeoX, and lines of primus itself."""

    NAME = "megatron"
    TITLE = "Megatron-LM"
    ANCHORS: ClassVar[tuple[bytes, ...]] = (b"iteration ",)
    SETTING_ANCHORS = (b" ..",)
    PREFERS_LAST_RANK = True
    MEMORY = "of the device that is in use"

    def __init__(self) -> None:
        super().__init__()
        self._layouts: dict[bytes, LineLayout | None] = {}
        """By what remains of a line without its digits."""
        self._has_bar = False
        """Whether a line has ended with a bar: one without is cut off then. Some forks print none."""

    def read_line(self, line: bytes) -> Iterable[LogStep]:
        is_iteration = False
        for found, prefix, text in split_steps(ITERATION, line):
            is_iteration = True
            yield self._read_iteration(float(found[1]), prefix, text)
        if not is_iteration:
            yield from self._read_other_line(line)

    def _read_other_line(self, line: bytes) -> Iterable[LogStep]:
        argument = ARGUMENT.match(line)
        if argument and len(self.settings) < MAX_SETTINGS:
            self.settings[argument[1].decode()] = argument[2].decode(errors="replace")
            return
        evaluation = VALIDATION.search(line)
        if evaluation:
            yield LogEvaluation({"step": float(evaluation[1]), "loss": parse_number(evaluation[2])})
        elif b"elapsed time per iteration" in line or re.search(rb"\biteration +\d+/", line):
            raise LogLineError("a line of an iteration that is cut off")

    def _read_iteration(self, step: float, prefix: bytes, text: bytes) -> LogStep:
        values = {"step": step}
        *segments, rest = text.split(b"|")
        if not rest.strip() or rest.lstrip().startswith(b"["):  # the prefix of a further line
            self._has_bar = True
        elif self._has_bar:
            raise LogLineError("the line is cut off")
        else:
            segments.append(rest)
        for segment in segments:
            name, colon, value = segment.partition(b": ")
            place = SEGMENTS.get(name.strip())
            if place and colon:
                suffix = SUFFIX.search(value)
                factor = SUFFIXES[suffix[1]] if suffix else 1.0
                values[place[0]] = parse_number(value) * factor / place[1]
            elif name.strip() in LENGTHS:
                self.settings["seq_length"] = value.strip().decode(errors="replace")
        if "step_time_s" not in values:
            raise LogLineError("no time of the iteration")
        # Not in short lines that other trainers print, nor in those of a skipped step, which has no loss.
        if values.keys() & {"grad_norm", "num_skipped"} and not values.get("num_skipped"):
            count_as_nonfinite(values)
        return LogStep(values, parse_rank(prefix), parse_time_stamp(prefix))

    def read_columns(self, lines: Sequence[bytes]) -> Mapping[str, Sequence[float]] | None:
        """Values of lines of one layout.

        Their numbers are decoded as one JSON array, which takes 1 us a line instead of 10: all but digits and
        separators is deleted from the text of all lines.
        """
        start = lines[0].find(b"iteration ")
        if start < 0 or len(lines) < FEWEST_ALIKE:
            return None
        # Prefixes have the same length, unless they hold the number of a rank.
        texts = [line[start:] for line in lines]
        text = b"\n".join(texts)
        skeleton = text.translate(None, NUMERIC + b" ")
        first = skeleton[: skeleton.find(b"\n") + 1]
        if skeleton != first * (len(texts) - 1) + first[:-1]:
            return None
        if first not in self._layouts:
            self._layouts[first] = _find_layout(texts[0])
        layout = self._layouts[first]
        numbers = _decode_numbers(text, layout.table) if layout else None
        if layout is None or numbers is None or len(numbers) != layout.num_numbers * len(texts):
            return None
        found: dict[str, Sequence[float]] = {}
        for name, (place, divisor) in layout.places.items():
            column = numbers[place :: layout.num_numbers]
            found[name] = column if divisor == 1.0 else [value / divisor for value in column]
        if not layout.table.has_pairs:
            factor = 10.0 ** len(str(layout.num_iterations))
            if set(map(fmod, found["step"], repeat(factor))) != {layout.num_iterations}:
                return None
            found["step"] = list(map(floordiv, found["step"], repeat(factor)))
        return found


def _find_layout(line: bytes) -> LineLayout | None:
    """The layout of a line; None if it has no loss, names hold digits, or values are not plain numbers."""
    iteration = ITERATION.match(line)
    if iteration is None or len(ITERATION.findall(line)) != 1 or not line.rstrip().endswith(b"|"):
        return None
    segments = [segment.partition(b": ")[::2] for segment in line.split(b"|")[1:-1]]
    counts = [len(NUMBER.findall(value)) for _, value in segments]
    table = PLAIN if all(count <= 1 for count in counts) else PAIRS
    places = {"step": (0, 1.0)}
    position = 2 if table.has_pairs else 1
    for (name, value), count in zip(segments, counts, strict=True):
        if _list_numbers(name, table) or len(_list_numbers(value, table)) != count or (count == 0 and value.strip()):
            return None
        known = SEGMENTS.get(name.strip())
        if known and SUFFIX.search(value):
            return None
        if known and count:
            places[known[0]] = (position, known[1])
        position += count
    return LineLayout(table, position, places, int(iteration[2])) if {"step_time_s", "loss"} <= places.keys() else None


def _list_numbers(text: bytes, table: NumberTable) -> list[bytes]:
    return [part for part in text.translate(table.commas, table.deleted).split(b",") if part]


def _decode_numbers(text: bytes, table: NumberTable) -> list[float] | None:
    """All numbers of the text; None if one is not a number of JSON."""
    numbers = text.translate(table.commas, table.deleted)
    if table.has_pairs:
        for repeated in (b",,,,", b",,", b",,"):
            numbers = numbers.replace(repeated, b",")
    try:
        return msgspec.json.decode(b"[" + numbers + b"]", type=list[float])
    except msgspec.DecodeError:
        return None
