"""The contract of benchmarks, their common options, and their results.

Times are seconds, sizes bytes, rates 1e9 B/s (GB/s) or 1e12 FLOP/s (TFLOP/s).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Annotated, Any, Literal, Protocol

from msgspec import Meta, Struct

from primus.config.flags import Positional
from primus.contract import PlugInKind, optional, optional_value
from primus.errors import UsageError, did_you_mean
from primus.machine.facts import DeviceKind
from primus.machine.measurements import Telemetry, Timing

if TYPE_CHECKING:
    import torch

    from primus.task import TaskContext

GemmDtype = Literal["fp32", "tf32", "bf16", "fp16", "fp8", "mxfp8", "mxfp4", "nvfp4"]
Mode = Literal["steady", "cold", "warm"]
"""State of the last-level cache at each call: ``steady`` rotates operands in back-to-back calls, ``cold`` also empties
the cache before each call, ``warm`` repeats the call on the same operands."""
CaseValue = str | int | float | bool | None
RESULT_FILE = "report/benchmark.json"
"""The result, in the run folder."""
SCHEMA = 1
"""Version of the result file."""
LIST = "list"
"""Word that lists the benchmarks instead of running one."""
ALIASES = {"rccl": "collectives", "nccl": "collectives"}
"""Other names of benchmarks; `rccl` is Primus' name (AMD-AGI/Primus benchmark)."""


class BenchmarkOptions(Struct, frozen=True, kw_only=True):
    """Options of every benchmark."""

    benchmark: Positional = LIST
    """Benchmark to run; `list` lists them."""
    output_file: Annotated[tuple[str, ...], Meta(extra={"aliases": ("--output", "-o")})] = ()
    """Result file, format by suffix: .md .txt .csv .tsv .json .jsonl .jsonl.gz .html; `-` prints Markdown."""
    append: bool = False
    """Append to result files instead of replacing them."""
    baseline: str | None = None
    """Result file to compare with, or `last` for the previous result on this machine; exit code 3 if a row is
    slower."""
    tolerance: str = "5%"
    """Relative difference from the baseline that is accepted."""
    duration: Annotated[float, Meta(gt=0, le=3600)] = 10.0
    """Longest measurement of a case, in seconds; it ends earlier when the median is known within --precision."""
    precision: str = "1%"
    """Width of the median's 95 % confidence interval at which a measurement ends."""
    quick: bool = False
    """Measure briefly, which gives noisier results."""
    device: DeviceKind = "auto"
    """Device to measure."""
    time_limit: Annotated[float, Meta(gt=0)] = 600.0
    """Time limit of the rendezvous and of each case, in seconds."""
    workspace: str = "output"
    """Folder of the run folders."""


class RankCallTimes(Struct, frozen=True, kw_only=True):
    """Times of one rank of a group, in seconds of a call."""

    rank: int
    loops_s: tuple[float, ...]
    """Mean of each loop of calls."""
    calls_s: tuple[float, ...] = ()
    """Single calls, if they were traced."""


class BenchmarkRow(Struct, frozen=True, kw_only=True):
    """One case of a benchmark, measured by one rank or by a group of ranks."""

    case: dict[str, CaseValue]
    """What was measured, which identifies the row: ``{"M": 4096, "dtype": "bf16", "mode": "steady"}``."""
    rank: int | None = None
    """Rank that measured; None for a group, whose time is that of its slowest rank."""
    value: float | None = None
    """The figure by which rows are compared; None if the case failed."""
    unit: str = ""
    """``TFLOP/s``, ``GB/s``, ``tokens/s``; ``us`` and ``s`` are times, of which less is better."""
    interval: tuple[float, float] | None = None
    """95 % confidence interval of `value`."""
    timing: Timing | None = None
    figures: dict[str, float] = {}
    """Further figures; each name ends in its unit: ``busbw_gb_per_s``."""
    by_rank: tuple[RankCallTimes, ...] = ()
    """Times of each rank of a group, if they were asked for."""
    flop: float | None = None
    """Operations of a call."""
    moved_bytes: float | None = None
    """Bytes that a call reads and writes at least."""
    peak: float | None = None
    """Limit of the device in `unit`."""
    share: float | None = None
    """`value` as a share of `peak`."""
    bound: str = ""
    """What limits the call by the roofline: ``compute``, ``memory`` or ``launch``."""
    convention: str = ""
    """What is counted, and the data."""
    wrong: int = 0
    """Wrong elements in the result."""
    problem: str = ""
    """Reason for a missing or wrong value."""


class DevicePeaks(Struct, frozen=True, kw_only=True):
    """Limits of one device, which rooflines use."""

    tflops: dict[str, float] = {}
    """Dense peak by data type."""
    gb_per_s: float | None = None
    """Bandwidth of its memory."""
    launch_s: float | None = None
    """Time of an operation on almost no data."""
    source: str = ""


class BenchmarkRank(Struct, frozen=True, kw_only=True):
    """One rank of a benchmark with its rows."""

    rank: int
    host: str
    device: str
    device_name: str
    peaks: DevicePeaks = DevicePeaks()
    rows: tuple[BenchmarkRow, ...] = ()
    telemetry: tuple[Telemetry, ...] = ()
    """Clock, power, temperature and throttling during the measurement; only on the first rank of a node."""
    core_wait_share: float | None = None
    """On a CPU: share of the time in which threads could run that they waited for a core."""
    problem: str = ""
    is_complete: bool = False


class BenchmarkResult(Struct, frozen=True, kw_only=True):
    """The result of a benchmark."""

    benchmark: str
    schema: int = SCHEMA
    options: dict[str, Any] = {}
    started: float = 0.0
    """Seconds since the epoch."""
    duration_s: float | None = None
    world_size: int = 1
    libraries: dict[str, str] = {}
    """Versions by name: torch, nccl, cuda, hip."""
    ranks: tuple[BenchmarkRank, ...] = ()
    notes: tuple[str, ...] = ()
    """Slow ranks, and other findings."""
    problem: str = ""
    """Reason why ranks are missing; empty if all completed."""

    @property
    def rows(self) -> tuple[BenchmarkRow, ...]:
        """The rows of all ranks."""
        return tuple(row for rank in self.ranks for row in rank.rows)


class BenchmarkPlan(Struct, frozen=True, kw_only=True):
    """What the workers of a benchmark run; `config/benchmark.json` of their run."""

    benchmark: str
    options: dict[str, Any]
    writes_to_console: bool = True


class BenchmarkContext(Protocol):
    """What a benchmark is given in each worker.

    A benchmark that loops over cases calls `measure` for each. A failure of a case, such as a lack of memory, becomes
    the `problem` of its row.
    """

    @property
    def rank(self) -> int:
        """This process among `world_size`."""
        ...

    @property
    def world_size(self) -> int: ...

    @property
    def local_rank(self) -> int:
        """This process among `num_local` on its node."""
        ...

    @property
    def num_local(self) -> int: ...

    @property
    def device(self) -> torch.device:
        """Device of this process."""
        ...

    @property
    def cache_bytes(self) -> int:
        """Size of the last-level cache."""
        ...

    @property
    def is_quick(self) -> bool: ...

    @property
    def precision(self) -> float:
        """Relative width of the median's interval at which a measurement ends."""
        ...

    @property
    def modes(self) -> Sequence[Mode]:
        """Cache states to measure: those of the option `mode`, if the benchmark has one, else ``steady``."""
        ...

    def count_sets(self, set_bytes: int, mode: Mode, /) -> int:
        """Number of operand sets of this size to rotate, so that none is in the cache when its turn comes.

        Raises:
            PrimusError: The sets exceed the free memory of the device; the message says by how much.
        """
        ...

    def measure(
        self, case: dict[str, CaseValue], make_call: Callable[[Mode], MeasuredCall], /, *, modes: Sequence[Mode] = ()
    ) -> Iterable[BenchmarkRow]:
        """A row of `case` for each cache state; `make_call` allocates the operands of one."""
        ...

    def wait_for_all(self, what: str, /) -> None:
        """Wait until all ranks are here, so that they measure at the same time; `measure` does so too."""
        ...

    def limit_time(self, what: str, /) -> AbstractContextManager[None]:
        """End the process if the body, which does `what`, takes longer than the time limit; `measure` does so too."""
        ...


class MeasuredCall(Struct, frozen=True, kw_only=True):
    """A call to time, and what it counts as."""

    call: Callable[[], object]
    """Queues the work; it does not wait for the device."""
    flop: float | None = None
    moved_bytes: float | None = None
    dtype: str = ""
    """Key of the device's peaks."""
    value: Literal["flop", "bytes", "time"] = "flop"
    """The figure: TFLOP/s, GB/s or microseconds."""
    convention: str = ""
    check: Callable[[], int] | None = None
    """Counts wrong elements in the result of the last call."""


class Benchmark(Protocol):
    """A measurement: `benchmarks/NAME.py`, typed as `primus-cli <runtime> -- benchmark NAME`.

    The file is imported on the control plane and in every worker: import tensor libraries inside `measure`.
    """

    @property
    def Options(self) -> type[BenchmarkOptions]:
        """A frozen subclass of `primus.benchmark.BenchmarkOptions`. Its fields are the flags, their docstrings the
        help."""
        ...

    @optional
    def measure(self, options: Any, context: BenchmarkContext, /) -> Iterable[BenchmarkRow]:
        """Yield the rows of this rank. Called in every worker process. All ranks run the same cases in the same order;
        rows of a group of ranks are yielded by the group's first rank only. Required without `measure_launches`."""
        raise NotImplementedError

    @property
    @optional_value(None)
    def measure_launches(self) -> Callable[[Any, TaskContext], Iterable[BenchmarkRow]] | None:
        """Function `measure_launches(options, context)` that yields rows by launching runs, in the place of
        workers and `measure`. Called on the control plane. Default: None; workers are started."""
        ...

    @optional
    def check_options(self, options: Any, /) -> None:
        """Raise `primus.errors.UsageError` for values that no machine can run, such as a shape of 0. Called on the
        control plane before workers start. Default: nothing is checked."""
        return None

    @optional
    def list_tables(self, options: Any, result: BenchmarkResult, /) -> Mapping[str, Sequence[dict[str, CaseValue]]]:
        """Further tables that the options ask for: the rows, with their columns by name, of each file. Called on the
        control plane after the measurement. Default: none."""
        return {}


BENCHMARKS = PlugInKind[Benchmark]("benchmarks", Benchmark, one_of=("measure", "measure_launches"))

_RANGE = re.compile(r"(?P<first>\d{1,15}):(?P<last>\d{1,15})(?::(?P<kind>[x+]?)(?P<step>\d{1,15}))?", re.ASCII)
_SIZE = re.compile(r"\d{1,15}", re.ASCII)
_BYTE_SIZE = re.compile(r"(?P<count>\d{1,15})(?P<unit>[kmgt]?)(i?b)?", re.ASCII | re.IGNORECASE)
_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}


def find_rank_file(rank: int) -> str:
    """Path of a rank's results in the run folder."""
    return f"report/benchmark/rank_{rank}.json"


def find_benchmark_name(word: str) -> str:
    """The name of the plug-in that `word` means."""
    return ALIASES.get(word.lower(), word)


def parse_sizes(text: str, option: str) -> list[int]:
    """The sizes in `text`, separated by commas: numbers, ``1024:16384:x2`` (factor) or ``1024:4096:1024`` (step).

    Raises:
        UsageError: One is not a positive number or not a range.
    """
    found: list[int] = []
    for part in text.split(","):
        match = _RANGE.fullmatch(part.strip())
        if match is None:
            found.append(_parse_size(part.strip(), option))
            continue
        size, last = _parse_size(match["first"], option), int(match["last"])
        kind, step = match["kind"] or "", int(match["step"] or 2)
        is_factor = kind == "x" or match["step"] is None
        if last < size:
            raise UsageError(f"{option} {part}: the range ends before it begins", "write the smaller size first")
        if step < (2 if is_factor else 1):
            raise UsageError(f"{option} {part}: the range has no end", "write FIRST:LAST:xFACTOR or FIRST:LAST:STEP")
        while size <= last:
            found.append(size)
            size = size * step if is_factor else size + step
    return found


def _parse_size(text: str, option: str) -> int:
    if not _SIZE.fullmatch(text) or int(text) == 0:
        raise UsageError(
            f"{option} {text or repr(text)}: a size is a positive number",
            "write a number, a list 1024,2048, or a range 1024:16384:x2",
        )
    return int(text)


def parse_byte_sizes(text: str, option: str) -> list[int]:
    """The sizes in `text`, separated by commas, in binary units as in nccl-tests: ``1K,64M,8G``.

    Raises:
        UsageError: One is not a positive size.
    """
    found = []
    for part in text.split(","):
        match = _BYTE_SIZE.fullmatch(part.strip())
        size = int(match["count"]) * _UNITS[match["unit"].lower()] if match else 0
        if size == 0:
            raise UsageError(f"{option} {part or repr(part)}: not a size", "write bytes with a unit: 1K,64M,8G")
        found.append(size)
    return found


def parse_share(text: str, option: str) -> float:
    """``5%`` or ``0.05`` as a number of at least 0 and below 1.

    Raises:
        UsageError: It is neither.
    """
    try:
        share = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        share = -1.0
    if not 0 <= share < 1:
        raise UsageError(f"{option} {text}: expected a share such as 5% or 0.05")
    return share


def check_positive(options: Struct, names: Sequence[str]) -> None:
    """Refuse options that are not positive.

    Raises:
        UsageError: One is 0 or less.
    """
    for name in names:
        value = getattr(options, name)
        if value is not None and value <= 0:
            raise UsageError(f"--{name.replace('_', '-')} {value}: expected a positive number")


def check_choice(word: str, choices: Iterable[str], option: str) -> str:
    """`word`, if it is one of `choices`.

    Raises:
        UsageError: It is not; the message names the nearest.
    """
    known = list(choices)
    if word not in known:
        raise UsageError(f"{option}: unknown name '{word}'", did_you_mean(word, known))
    return word
