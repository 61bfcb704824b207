"""Lines of Megatron-LM and of its descendants: `name: value` between bars, after `iteration N/M`.

Source: `training_log` in megatron/training/training.py of NVIDIA/Megatron-LM. The elapsed time is the mean over the
iterations since the last line. A loss is printed only if it is at least 0: a line without one is of a step whose loss
is not a number.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import TYPE_CHECKING, ClassVar

from primus.training_logs.line_layout import LineLayout, NumberPlace
from primus.training_logs.line_values import NUMBER, LogLineError, check_commas, find_clock, find_rank, parse_number
from primus.training_logs.log_step import LogStep
from primus.training_logs.step_reader import LogEvaluation, StepReader

if TYPE_CHECKING:
    from primus.training_logs.line_columns import ColumnScanner, ScannedBlock

ITERATION = re.compile(rb"\biteration +(\d+)/ *(?:\d+|infinity) *\|")
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
    b"load_balancing_loss": ("load_balancing_loss", 1.0),
    b"seq_load_balancing_loss": ("load_balancing_loss", 1.0),
    b"global_load_balancing_loss": ("load_balancing_loss", 1.0),
    b"moe loss": ("load_balancing_loss", 1.0),
    b"z_loss": ("router_z_loss", 1.0),
    b"mtp_1 loss": ("mtp_loss", 1.0),
    b"grad norm": ("grad_norm", 1.0),
    b"number of skipped iterations": ("num_skipped", 1.0),
    b"energy per GPU (J/iter/GPU)": ("energy_j_per_device", 1.0),
    b"memory per device (GiB)": ("memory_gib", 1.0),
    b"hip mem usage/free/total/usage_ratio": ("memory_gib", 1.0),
    b"rocm mem usage/free/total/usage_ratio": ("memory_gib", 1.0),
}
"""Field and divisor by the name of a segment; the first number counts, which is that of this line, not an average."""

LENGTHS = (b"actual seqlen", b"actual seq length")
"""Names of the tokens of a sample."""
SUFFIX = re.compile(rb"\d([KMBT])\b")
SUFFIXES = {b"K": 1e3, b"M": 1e6, b"B": 1e9, b"T": 1e12}
MAX_STEP_DIGITS = 15
"""A longer number is not exact."""


class MegatronReader(StepReader):
    """Megatron-LM, Megatron-DeepSpeed, GPT-NeoX, and lines of primus itself."""

    NAME = "megatron"
    TITLE = "Megatron-LM"
    PRECEDENCE = 1
    ANCHORS: ClassVar[tuple[bytes, ...]] = (b"iteration ",)
    SETTING_ANCHORS = (b" ..",)
    PREFERS_LAST_RANK = True
    MEMORY = "of the device that is in use"

    def __init__(self) -> None:
        super().__init__()
        self._scanner: ColumnScanner | None = None
        self._has_bar = False
        """Whether a line has ended with a bar: one without is cut off then. Some forks print none."""

    def read_line(self, line: bytes) -> Iterable[LogStep]:
        found = list(ITERATION.finditer(line))
        if not found:
            yield from self._read_other_line(line)
            return
        # Several ranks may have written into one line.
        ends = [*(match.start() for match in found[1:]), len(line)]
        for number, (match, end) in enumerate(zip(found, ends, strict=True)):
            layout = self._find_layout(line, match, end, 0 if number == 0 else match.start())
            self._note_settings(layout, line)
            yield layout.read_line(line)

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

    def _find_layout(self, line: bytes, found: re.Match[bytes], end: int, start: int) -> LineLayout:
        """Where the values of a step are, which extends from `start` to `end` of the line."""
        places, words, settings = {"step": NumberPlace(*found.span(1))}, {}, {}
        for segment in self._list_segments(line, found.end(), end):
            name, mark, value = line[slice(*segment)].partition(b": ")
            if not mark:  # of 2019: `lm loss 7.399415E+00`
                name, mark, value = name.rstrip().rpartition(b" ")
            field = SEGMENTS.get(name.strip())
            offset = segment[0] + len(name) + len(mark)
            if field and mark:
                number = NUMBER.search(value)
                if number is None:
                    raise LogLineError(value.decode(errors="replace"))
                check_commas(number[0])
                suffix = SUFFIX.search(value)
                factor = SUFFIXES[suffix[1]] if suffix else 1.0
                place = NumberPlace(offset + number.start(), offset + number.end(), factor, field[1])
                if number[0][-1:].isalpha():
                    words[field[0]] = float(number[0])
                else:
                    places[field[0]] = place
            elif name.strip() in LENGTHS:
                settings["seq_length"] = (offset, segment[1])
        names = places.keys() | words.keys()
        if "step_time_s" not in names:
            raise LogLineError("no time of the iteration")
        rank, clock = find_rank(line[start : found.start()]), find_clock(line[start : found.start()])
        return LineLayout(
            places=places,
            words=words,
            settings=settings,
            rank=rank and (start + rank[0], start + rank[1]),
            clock=tuple(start + position for position in clock),
            # Not in short lines that other trainers print.
            lacks_loss="loss" not in names and bool(names & {"grad_norm", "num_skipped"}),
        )

    def _list_segments(self, line: bytes, start: int, end: int) -> list[tuple[int, int]]:
        """Start and end of the parts between bars."""
        bars = [match.start() for match in re.finditer(rb"\|", line[start:end])]
        starts = [start, *(start + bar + 1 for bar in bars)]
        segments = list(zip(starts, [*(start + bar for bar in bars), end], strict=True))
        rest = line[slice(*segments[-1])].strip()
        if not rest or rest.startswith(b"["):  # the prefix of a further line
            self._has_bar = True
            return segments[:-1]
        if self._has_bar:
            raise LogLineError("the line is cut off")
        return segments

    def _note_settings(self, layout: LineLayout, line: bytes) -> None:
        for name, span in layout.settings.items():
            self.settings[name] = line[slice(*span)].strip().decode(errors="replace")

    def scan_block(self, block: bytes) -> ScannedBlock | None:
        if self._scanner is None:
            try:
                from primus.training_logs.line_columns import ColumnScanner
            except ImportError:  # NumPy is not a requirement of the package
                return None
            self._scanner = ColumnScanner(self.ANCHORS[0], self._find_single_layout)
        found = self._scanner.scan(block)
        if found.last:
            self._note_settings(*found.last)
        return found

    def _find_single_layout(self, line: bytes) -> LineLayout | None:
        """The layout of a line of one step that is known to be whole; None for others."""
        found = list(ITERATION.finditer(line))
        if len(found) != 1 or len(found[0][1]) > MAX_STEP_DIGITS or not line.rstrip().endswith(b"|"):
            return None
        try:
            return self._find_layout(line, found[0], len(line), 0)
        except LogLineError:
            return None


READER = MegatronReader
