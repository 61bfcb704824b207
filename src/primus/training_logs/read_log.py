"""Read a log: recognize its format, find its steps in large blocks, and merge ranks and restarts."""

from __future__ import annotations

import contextlib
import math
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from functools import cache
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec import Struct, field, structs

from primus import registry
from primus.errors import UsageError, did_you_mean
from primus.framework import LOGS
from primus.training_logs.formats import run_events, tensorboard
from primus.training_logs.formats.mlperf import MlperfReader
from primus.training_logs.formats.short_lines import ShortLineReader
from primus.training_logs.line_values import LogLineError
from primus.training_logs.log_step import LogStep
from primus.training_logs.log_stream import LogStream, open_log, select_lines, split_blocks
from primus.training_logs.step_merger import LogAttempt, StepMerger
from primus.training_logs.step_reader import LogEvaluation, StepReader
from primus.training_logs.step_table import StepTable

if TYPE_CHECKING:
    from primus.training_logs.step_rows import StepRows


@cache
def list_readers() -> tuple[type[StepReader], ...]:
    """The most specific one first: of several that read a log, the first one that finds losses is taken."""
    found = [registry.load_plug_in(LOGS, name).READER for name in registry.list_plug_ins(LOGS.name)]
    return tuple(sorted((*found, MlperfReader, ShortLineReader), key=lambda reader: -reader.PRECEDENCE))


AUTO = "auto"
MAX_EXAMPLES = 5
MAX_EXAMPLE_LENGTH = 300
MAX_EVALUATIONS = 10_000
MERGED_ROWS = 1 << 14
"""Lines of steps that are merged at once."""
MAX_SAMPLES = 100
"""Lines of a block that are read to recognize the format."""


class UnreadLine(Struct, frozen=True):
    """A line of a step that could not be read."""

    number: int
    text: str
    problem: str


class TrainingLog(Struct, kw_only=True):
    """What a log says."""

    path: str
    format: str
    """Name of the format."""
    title: str
    """Name of the trainer."""
    memory: str = ""
    """The meaning of the column `memory_gib`."""
    steps: StepTable = field(default_factory=StepTable)
    attempts: list[LogAttempt] = []
    evaluations: list[LogEvaluation] = []
    settings: dict[str, str] = {}
    """Settings that the log prints."""
    num_bytes: int = 0
    num_lines: int = 0
    num_ranks: int = 1
    """Ranks that print steps."""
    num_repeated: int = 0
    """Lines about a step that another line is about, too."""
    num_nonfinite_losses: int = 0
    has_derived_times: bool = False
    """Whether times of steps are differences of time stamps."""
    step_note: str = ""
    """The doubts about the numbers of steps."""
    is_cut_off: bool = False
    """Whether the file ends within a line of a step; that line is not read."""
    damage: str = ""
    """The reason why a compressed file could not be read to its end."""
    num_unread: int = 0
    unread: list[UnreadLine] = []
    """Examples of lines that were not read."""
    first_line: str = ""
    """First line of the file, to show what it is."""


def read_log(path: Path, name: str = AUTO) -> TrainingLog:
    """Read one file.

    Args:
        path: A log, which may be compressed by gzip, xz or bzip2 and may be a pipe, or an event file of TensorBoard.
        name: Its format; `auto` to recognize it.

    Raises:
        UsageError: The file or the format does not exist, or no format reads a step in the file.
    """
    names = [AUTO, tensorboard.NAME, *(each.NAME for each in list_readers())]
    if name not in names:
        raise UsageError(f"--format {name}: unknown format", did_you_mean(name, names))
    try:
        if name == tensorboard.NAME or (name == AUTO and tensorboard.MARK in path.name):
            log = _read_event_file(path)
        elif path.name == run_events.FILE and name == AUTO:
            log = _read_run(path)
        elif reader := next(
            (each for each in list_readers() if path.name == each.FILE and name in (AUTO, each.NAME)), None
        ):
            log = _read_whole_file(path, reader)
        else:
            with open_log(path) as file:
                reader = find_format(file, str(path)) if name == AUTO else _find_reader(name)
                file.rewind()
                log = StepScan(str(path), reader).run(file)
    except OSError as error:
        raise UsageError(f"{path}: {getattr(error, 'strerror', None) or error}") from None
    if not len(log.steps) and not log.evaluations:
        raise UsageError(
            f"{path}: no steps of {log.title} in {log.num_lines:,} lines",
            _describe_start(log.first_line),
        )
    return log


def _find_reader(name: str) -> type[StepReader]:
    return next(reader for reader in list_readers() if name == reader.NAME)


def find_format(file: LogStream, path: str) -> type[StepReader]:
    """The format of a log: of those that read steps in the first blocks with steps, the first one with losses.

    Raises:
        UsageError: No format reads a step.
    """
    found: dict[type[StepReader], bool] = {}
    num_lines, first_line, problems = 0, "", dict[type[StepReader], str]()
    for block, _ in split_blocks(file):
        lines = block.split(b"\n")
        first_line = first_line or _shorten(lines[0])
        is_last = bool(found)
        for kind in list_readers():
            losses = _count_losses(kind, lines, problems) if any(anchor in block for anchor in kind.ANCHORS) else None
            if losses is not None:
                found[kind] = found.get(kind, False) or losses > 0
        num_lines += len(lines)
        if is_last:
            break
    if not found and file.damage:
        raise UsageError(f"{path}: {file.damage}", "copy the file again")
    if not found and problems:
        kind, problem = next(iter(problems.items()))
        raise UsageError(f"{path}: no line of {kind.TITLE} can be read: {problem}", _describe_start(first_line))
    if not found:
        raise UsageError(
            f"{path}: no steps of any known format in {num_lines:,} lines",
            _describe_start(first_line),
        )
    return next((kind for kind in list_readers() if found.get(kind)), next(iter(found)))


def _count_losses(kind: type[StepReader], lines: Sequence[bytes], problems: dict[type[StepReader], str]) -> int | None:
    """Losses that a format finds in lines; None if it finds nothing, or only lines that another one reads, too.

    The first reason why it cannot read a line is added to `problems`.
    """
    chosen = list(islice((line for line in lines if any(anchor in line for anchor in kind.ANCHORS)), MAX_SAMPLES))
    if not chosen or not any(map(kind.recognizes, chosen)):
        return None
    reader, losses, is_found = kind(), 0, False
    for line in chosen:
        try:
            for step in reader.read_line(line):
                is_found = True
                losses += step.values.get("loss", float("nan")) == step.values.get("loss")
        except LogLineError as error:
            problems.setdefault(kind, str(error))
        except ValueError:
            continue
    for step in reader.finish():
        is_found = True
        losses += "loss" in step.values
    return losses if is_found else None


class StepScan:
    """One pass over a log with the reader of its format."""

    def __init__(self, path: str, kind: type[StepReader]) -> None:
        self.log = TrainingLog(path=path, format=kind.NAME, title=kind.TITLE, memory=kind.MEMORY)
        self._reader = kind()
        self._merger = StepMerger(self.log.steps, prefers_last_rank=kind.PREFERS_LAST_RANK)
        self._has_steps = False
        self._rows: list[StepRows] = []
        """Rows that are not merged yet."""
        self._num_rows = 0

    def run(self, file: LogStream) -> TrainingLog:
        """Read the file to its end."""
        log, reader, merger = self.log, self._reader, self._merger
        for block, is_whole in split_blocks(file):
            log.first_line = log.first_line or _shorten(block.partition(b"\n")[0])
            whole, newline, last = (block, b"", b"") if is_whole else block.rpartition(b"\n")
            if is_whole or newline:
                log.num_lines += self._read_block(whole)
            if not is_whole:
                self._read_last_line(last)
                log.num_lines += 1
        log.num_bytes, log.damage = file.num_bytes, file.damage
        with contextlib.suppress(LogLineError):
            self._add(reader.finish())
        self._merge_rows()
        merger.close()
        log.attempts, log.settings = merger.attempts, reader.settings
        log.num_ranks, log.num_repeated = merger.lines_per_step, merger.num_copies
        log.num_nonfinite_losses, log.has_derived_times = merger.num_nonfinite_losses, merger.has_derived_times
        log.step_note = reader.step_note
        if (reader.step_factor, reader.step_offset) != (1.0, 0.0):
            _scale_steps(log, reader.step_factor, reader.step_offset)
        return log

    def _read_block(self, block: bytes) -> int:
        """Read lines; gives their number."""
        reader = self._reader
        found = reader.scan_block(block) if self._has_steps else None
        if found is None:
            anchors = reader.ANCHORS if self._has_steps else reader.ANCHORS + reader.SETTING_ANCHORS
            for line in select_lines(block, anchors):
                self._read_line(line, block)
            return block.count(b"\n") + 1
        added = 0
        for number, line in found.others:
            before = bisect_left(found.lines, number)
            self._keep_rows(found.rows, added, before)
            added = before
            self._read_line(line, block)
        self._keep_rows(found.rows, added, len(found.lines))
        return found.num_lines

    def _read_line(self, line: bytes, block: bytes) -> None:
        try:
            steps = list(self._reader.read_line(line))
            self._add(steps)
        except ValueError as error:  # of ours, or of a number that is damaged
            self._note_unread(line, block, str(error))

    def _keep_rows(self, rows: StepRows | None, start: int, end: int) -> None:
        """Keep rows until there are many: the last steps of rows, which other ranks may complete, are merged slowly."""
        if rows is None or start == end:
            return
        self._rows.append(rows.take(slice(start, end)))
        self._num_rows += end - start
        if self._num_rows >= MERGED_ROWS:
            self._merge_rows()

    def _merge_rows(self) -> None:
        if self._rows:
            self._merger.add_rows(self._rows)
        self._rows, self._num_rows = [], 0

    def _read_last_line(self, line: bytes) -> None:
        """Read the end of a file without a newline, unless it is a part of a line of a step."""
        if not any(anchor in line for anchor in self._reader.ANCHORS):
            return
        end = self._reader.END
        self.log.is_cut_off = end is not None and end.search(line) is None
        if self.log.is_cut_off:
            return
        try:
            self._add(self._reader.read_line(line))
        except ValueError:
            self.log.is_cut_off = True

    def _add(self, found: Iterable[LogStep]) -> None:
        for step in found:
            if not math.isfinite(step.values["step"]):
                raise LogLineError("the step is not a number")
            if isinstance(step, LogEvaluation):
                self.log.evaluations += [step] if len(self.log.evaluations) < MAX_EVALUATIONS else []
            else:
                self._has_steps = True
                self._merge_rows()
                self._merger.add_step(step)

    def _note_unread(self, line: bytes, block: bytes, problem: str) -> None:
        log = self.log
        log.num_unread += 1
        if len(log.unread) < MAX_EXAMPLES:
            log.unread.append(
                UnreadLine(log.num_lines + block.count(b"\n", 0, block.find(line)) + 1, _shorten(line), problem)
            )


def _scale_steps(log: TrainingLog, factor: float, offset: float) -> None:
    """Make steps of the numbers of records."""
    log.steps.scale("step", factor, offset)
    log.steps.scale("step_time_s", 1 / factor)
    for evaluation in log.evaluations:
        evaluation.values["step"] = evaluation.values["step"] * factor + offset
    log.attempts = [
        structs.replace(
            each, first_step=int(each.first_step * factor + offset), last_step=int(each.last_step * factor + offset)
        )
        for each in log.attempts
    ]


def _read_event_file(path: Path) -> TrainingLog:
    log = TrainingLog(path=str(path), format=tensorboard.NAME, title=tensorboard.TITLE)
    try:
        with path.open("rb") as file:
            return _fill_log(log, path, tensorboard.read_event_steps(file))
    except tensorboard.EventFileError as error:
        raise UsageError(f"{path}: {error}") from None


def _read_run(path: Path) -> TrainingLog:
    log = TrainingLog(path=str(path.parent), format=run_events.NAME, title=run_events.TITLE)
    steps, log.evaluations, log.settings = run_events.read_run_events(path)
    return _fill_log(log, path, steps)


def _read_whole_file(path: Path, reader: type[StepReader]) -> TrainingLog:
    log = TrainingLog(path=str(path), format=reader.NAME, title=reader.TITLE)
    try:
        found = list(reader.read_file(path.read_bytes()))
    except LogLineError as error:
        raise UsageError(f"{path}: {error}") from None
    log.evaluations = [step for step in found if isinstance(step, LogEvaluation)]
    return _fill_log(log, path, (step for step in found if not isinstance(step, LogEvaluation)))


def _fill_log(log: TrainingLog, path: Path, steps: Iterable[LogStep]) -> TrainingLog:
    """Merge the steps of a file without lines."""
    merger = StepMerger(log.steps)
    log.num_bytes = path.stat().st_size
    for step in steps:
        merger.add_step(step)
    merger.close()
    log.attempts, log.num_nonfinite_losses = merger.attempts, merger.num_nonfinite_losses
    log.has_derived_times = merger.has_derived_times
    return log


def _describe_start(first_line: str) -> str:
    """The first line of a log in which nothing was found, as a hint."""
    if not first_line:
        return "the file is empty"
    return "the file is binary, not a log" if "\0" in first_line else f"the first line is: {first_line}"


def _shorten(line: bytes) -> str:
    text = line.decode(errors="replace").strip()
    return text if len(text) <= MAX_EXAMPLE_LENGTH else f"{text[:MAX_EXAMPLE_LENGTH]}..."
