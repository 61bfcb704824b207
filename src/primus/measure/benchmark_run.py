"""One rank of a benchmark: runs its cases, and writes the results to the run folder."""

from __future__ import annotations

import math
import os
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from datetime import timedelta

import msgspec
import torch
import torch.distributed as dist
from msgspec import structs

from primus import registry
from primus.benchmark import (
    BENCHMARKS,
    RESULT_FILE,
    BenchmarkOptions,
    BenchmarkPlan,
    BenchmarkRank,
    BenchmarkResult,
    BenchmarkRow,
    CaseValue,
    MeasuredCall,
    Mode,
    find_rank_file,
    parse_share,
)
from primus.errors import EXIT_TIMED_OUT, PrimusError
from primus.machine.profile import find_profile_by_name
from primus.measure.devices import telemetry
from primus.measure.devices.device import find_array_bytes, find_cache_bytes, find_free_bytes, own_device, share_cores
from primus.measure.devices.device_peaks import create_peak_turns, find_device_peaks
from primus.measure.devices.roofline import build_row
from primus.measure.network import collectives
from primus.measure.network.collectives import RankGroup
from primus.measure.network.rank_groups import join_all_ranks, list_nodes, read_first_line, read_library_versions
from primus.measure.timing import QUICK, Effort, create_clock, measure_call
from primus.measure.watchdog import Watchdog
from primus.process import measure_core_wait
from primus.report import table
from primus.report.benchmark_table import format_case
from primus.runs.attempt import Attempt
from primus.runs.files import write_json

FLUSH_CACHES = 2
"""A write of this many last-level caches empties them."""
USABLE_SHARE = 0.9
"""Share of the free memory that operands may use; the rest is for workspaces of libraries."""
FEWEST_CALLS = 5
"""Minimum number of calls of a case, also if they take longer than the measurement."""
MOST_LIMITS = 3
"""A rank may wait for others for this many time limits: each of them stops its own case after one."""


def run_benchmark(attempt: Attempt, plan: BenchmarkPlan) -> None:
    """Run the benchmark of `plan` as one rank; rank 0 collects the results of all ranks.

    Raises:
        UnfitError: This process has no device.
        PrimusError: The rendezvous failed, or another process exited.
    """
    if not plan.writes_to_console:
        attempt.console = None
    plug_in = registry.load_plug_in(BENCHMARKS, plan.benchmark)
    options = msgspec.convert(plan.options, plug_in.Options)
    worker = BenchmarkWorker(attempt, plan, options)
    try:
        with worker.start():
            for row in plug_in.measure(options, worker):
                worker.keep_row(row)
        worker.finish()
    except PrimusError as error:
        worker.keep_problem(error)
        raise
    finally:
        worker.close()


class BenchmarkWorker:
    """One rank, with its results so far: a `primus.benchmark.BenchmarkContext`.

    All ranks call `start`, `measure` for the same cases in the same order, and `finish`, which are collectives. `close`
    follows in any case. After an error `finish` is skipped: the other ranks then run into their time limits, and the
    partial results are in the file of each rank.
    """

    def __init__(self, attempt: Attempt, plan: BenchmarkPlan, options: BenchmarkOptions) -> None:
        self._started = time.time()
        self._attempt, self._plan, self._options = attempt, plan, options
        self.rank, self.local_rank, self.world_size = attempt.rank, attempt.local_rank, attempt.world_size
        self.num_local = 1
        self.is_quick = options.quick
        self.modes: Sequence[Mode] = getattr(options, "mode", ("steady",))
        self.precision = parse_share(options.precision, "--precision")
        self.device = own_device(attempt.local_rank, os.environ, options.device)
        self._clock = create_clock(self.device)
        self._effort = _make_effort(options)
        self._watchdog = Watchdog(options.time_limit, self._handle_expiry)
        self._num_cases = 0
        self._everyone = RankGroup("all", (0,), 0, self.device, None)
        self._flush_buffer: torch.Tensor | None = None
        name = torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else "CPU"
        profile = find_profile_by_name(name) if self.device.type == "cuda" else None
        self.cache_bytes = find_cache_bytes(self.device, profile.last_level_cache_bytes if profile else None)
        self._part = BenchmarkRank(
            rank=attempt.rank, host=socket.gethostname(), device=str(self.device), device_name=name
        )

    @contextmanager
    def start(self) -> Iterator[None]:
        """Join the other ranks, find the limits of the device, and watch it during the body."""
        patience = timedelta(seconds=self._options.time_limit * MOST_LIMITS)
        with self.limit_time("the rendezvous of the ranks"):
            self._everyone = join_all_ranks(self._attempt, self.device, patience)
            nodes = list_nodes(self._attempt.rank - self._attempt.local_rank, self._everyone)
        self.num_local = len(next(ranks for ranks in nodes if self.rank in ranks))
        if self.device.type == "cpu":
            share_cores(os.environ, self.num_local)
        with self.limit_time("measuring the limits of the device"):
            max_bytes = find_array_bytes(self.device, self.num_local, is_quick=self.is_quick)
            peaks = find_device_peaks(
                self.device, self._clock, num_threads=torch.get_num_threads(), max_bytes=max_bytes
            )
        # Before the cases: a rank that is killed later leaves rows that can be compared with the limits of its device.
        self._write_part(peaks=peaks)
        sampler = telemetry.create_sampler(self.local_rank, self.device.type, self._effort.measure_s)
        with sampler or nullcontext():
            yield
        self._write_part(telemetry=sampler.summarize_telemetry() if sampler else ())

    def count_sets(self, set_bytes: int, mode: Mode) -> int:
        """Number of operand sets of this size to rotate; see `primus.benchmark.BenchmarkContext`."""
        # One more than fills the cache: the least recently used set is evicted before its turn comes again.
        wanted = max(2, math.ceil(self.cache_bytes / set_bytes) + 1) if mode == "steady" else 1
        free_bytes = int(find_free_bytes(self.device) * USABLE_SHARE)
        if self.device.type == "cpu":
            free_bytes //= self.num_local  # the ranks of a node share its memory, and allocate at the same time
        fewest = 2 if mode == "steady" else 1
        if fewest * set_bytes > free_bytes:
            raise PrimusError(
                f"does not fit memory: {table.format_size(fewest * set_bytes)} needed for {fewest} set"
                f"{'s' * (fewest > 1)} of operands, {table.format_size(free_bytes)} usable on {self.device}"
            )
        return min(wanted, free_bytes // set_bytes)

    def measure(
        self, case: dict[str, CaseValue], make_call: Callable[[Mode], MeasuredCall], *, modes: Sequence[Mode] = ()
    ) -> Iterator[BenchmarkRow]:
        """A row of `case` for each cache state; see `primus.benchmark.BenchmarkContext`."""
        for mode in modes or self.modes:
            whole = {**case, "mode": mode}
            self.wait_for_all(f"waiting for all ranks before {format_case(whole)}")
            with self.limit_time(f"{self._plan.benchmark} {format_case(whole)}"):
                row = self._measure_case(whole, mode, make_call)
            yield row

    def wait_for_all(self, what: str) -> None:
        """Wait until all ranks are here, so that they measure at the same time."""
        with self.limit_time(what, MOST_LIMITS):
            collectives.barrier(self._everyone)

    def keep_row(self, row: BenchmarkRow) -> None:
        """Add a row to the results; rank 0 prints it."""
        self._write_part(rows=(*self._part.rows, row))
        value = row.problem
        if row.value is not None:
            value = f"{table.format_number(row.value)} {table.format_unit(row.unit)}"
        self._attempt.say(f"{self._plan.benchmark} {format_case(row.case)}: {value}")

    def keep_problem(self, error: PrimusError) -> None:
        """Record why the benchmark ended early."""
        self._write_part(problem=error.problem)

    def finish(self) -> None:
        """Collect the results of all ranks; rank 0 writes them."""
        core_wait = measure_core_wait() if self.device.type == "cpu" else None
        self._write_part(is_complete=True, core_wait_share=core_wait)
        parts: list[BenchmarkRank | None] = [self._part]
        with self.limit_time("collecting the results", MOST_LIMITS):
            if self.world_size > 1:
                parts = [None] * self.world_size
                # Over the network and not through the run folder, which the nodes may not share.
                dist.all_gather_object(parts, self._part, group=self._everyone.handle)
        if self.rank == 0:
            result = BenchmarkResult(
                benchmark=self._plan.benchmark,
                options=self._plan.options,
                started=self._started,
                duration_s=time.time() - self._started,
                world_size=self.world_size,
                libraries=read_library_versions(),
                ranks=tuple(part for part in parts if part),
            )
            write_json(self._attempt.run.directory / RESULT_FILE, result)
            self._attempt.event("benchmark_measured", benchmark=self._plan.benchmark, duration_s=result.duration_s)

    def close(self) -> None:
        """Leave the process group; with NCCL this may wait for ranks that have exited, until the process exits."""
        if dist.is_initialized() and (self.device.type == "cpu" or not self._part.problem):
            dist.destroy_process_group()

    def _measure_case(
        self, case: dict[str, CaseValue], mode: Mode, make_call: Callable[[Mode], MeasuredCall]
    ) -> BenchmarkRow:
        try:
            measured = make_call(mode)
            if not isinstance(measured, MeasuredCall):
                raise TypeError(f"make_call returned {type(measured).__name__}, not primus.benchmark.MeasuredCall")
            flush = self._flush_cache if mode == "cold" else None
            turns = None
            if measured.flop:
                turns = create_peak_turns(self.device, measured.dtype, torch.get_num_threads())
            with self._attempt.stop_at_once():
                timing = measure_call(measured.call, self._clock, self._effort, flush, turns.measure if turns else None)
            peaks = self._part.peaks
            if turns:
                peaks = structs.replace(peaks, tflops={measured.dtype: turns.tflops})
            row = build_row(case, measured, timing, peaks)
            wrong = measured.check() if measured.check else 0
        # A library reports a shape or a type that it does not offer, and a lack of memory, by these exceptions.
        except (RuntimeError, NotImplementedError, ValueError, TypeError, MemoryError, PrimusError) as error:
            row, wrong = BenchmarkRow(case=case, problem=read_first_line(error)), 0
        finally:
            if self.device.type == "cuda":
                torch.cuda.empty_cache()  # memory that the allocator keeps would be missing in the next case
        problem = f"{wrong} elements are wrong" if wrong else row.problem
        return structs.replace(row, rank=self.rank, wrong=wrong, problem=problem)

    def _flush_cache(self) -> None:
        if self._flush_buffer is None:
            self._flush_buffer = torch.empty(FLUSH_CACHES * self.cache_bytes, dtype=torch.uint8, device=self.device)
        self._flush_buffer.fill_(1)

    @contextmanager
    def limit_time(self, what: str, num_limits: int = 1) -> Iterator[None]:
        """End the process if the body, which does `what`, takes longer than its time limits."""
        self._num_cases += 1
        self._attempt.beat("test", self._num_cases)
        self._attempt.raise_if_stopped()
        with self._watchdog.limit_time(what, num_limits):
            try:
                yield
            except RuntimeError as error:  # torch.distributed reports a lost peer so
                raise PrimusError(
                    f"{what}: {read_first_line(error)}",
                    "a rank exited or is not reachable: see the logs of the other ranks",
                ) from error

    def _handle_expiry(self, error: PrimusError) -> None:
        # Called by the watchdog in its own thread: writes files only, without any collective.
        self.keep_problem(error)
        self._attempt.record_failure(error, EXIT_TIMED_OUT)

    def _write_part(self, **changes: object) -> None:
        # Replaced by rename after each row: the last state is readable however the process ends.
        self._part = structs.replace(self._part, **changes)
        write_json(self._attempt.run.directory / find_rank_file(self.rank), self._part)


def _make_effort(options: BenchmarkOptions) -> Effort:
    precision = parse_share(options.precision, "--precision")
    if options.quick:
        return structs.replace(QUICK, precision=precision)
    longest_warm_up_s = min(10.0, options.duration)
    return Effort(
        warm_up_s=min(1.0, options.duration),
        longest_warm_up_s=longest_warm_up_s,
        calls=100_000,
        fewest_calls=FEWEST_CALLS,
        measure_s=options.duration,
        precision=precision,
    )
