"""Preflight measurements of one rank: its device, its node, all nodes, then pairs of nodes."""

from __future__ import annotations

import math
import os
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist
from msgspec import structs

from primus.errors import EXIT_TIMED_OUT, PrimusError
from primus.machine import measurements
from primus.machine.measurements import (
    Collective,
    MeasuredFigure,
    MeasurementPlan,
    Pair,
    RankMeasurements,
    RankResult,
    list_pair_rounds,
)
from primus.measure.devices import memory
from primus.measure.devices.device import find_array_bytes, find_cache_bytes, find_free_bytes, own_device
from primus.measure.endurance import endurance
from primus.measure.endurance.endurance import WORKLOAD, EnduranceWorkload
from primus.measure.kernels import gemm
from primus.measure.network import collectives, scan
from primus.measure.network.collectives import RankGroup
from primus.measure.network.rank_groups import (
    create_group,
    join_all_ranks,
    list_nodes,
    read_first_line,
    read_library_versions,
)
from primus.measure.timing import FULL, LONG_ENOUGH, QUICK, MeasuredDevice, create_clock, limit_effort
from primus.measure.watchdog import Watchdog
from primus.process import count_usable_cpus
from primus.report import table
from primus.runs.attempt import Attempt
from primus.runs.files import write_json

SANITY_SIZES = {"cuda": 2048, "cpu": 256}
COPY_BYTES = 256 * 2**20
"""Size of the copies in TransferBench's acceptance test for AMD Instinct."""
MOST_FIGURES = 5
"""Parts of one device test, each with its own limit; other ranks may wait for their sum."""
LONGEST_S = 10.0
LONGEST_QUICK_S = 0.3
"""Limit of the timed loop of one collective."""


def run(attempt: Attempt, asked: MeasurementPlan, workload: EnduranceWorkload = WORKLOAD) -> None:
    """Run all tests and write the results to the run folder; rank 0 prints progress.

    Each test has the time limit of `asked`. If a test exceeds it, the process exits; the run's error file names the
    test, and the results so far are kept.

    Args:
        attempt: The rank.
        asked: The tests.
        workload: Computations of the long tests.

    Raises:
        UnfitError: This process has no device.
        PrimusError: The rendezvous failed, or another process exited.
    """
    suite = Suite(attempt, asked, workload)
    try:
        suite.run()
    except PrimusError as error:
        suite.keep_problem(error)
        raise
    finally:
        suite.close()


class Suite:
    """Runs the tests of one rank and holds its results so far."""

    def __init__(self, attempt: Attempt, asked: MeasurementPlan, workload: EnduranceWorkload = WORKLOAD) -> None:
        self._started = time.monotonic()
        self._attempt = attempt
        self._asked = asked
        self._workload = workload
        self._device = device = own_device(attempt.local_rank, os.environ, asked.device)
        self._clock = create_clock(device)
        self._num_local = 1
        self._num_tests = 0
        self._watchdog = Watchdog(asked.timeout_s, self._handle_expiry)
        # Ranks wait for each other in barriers for at most MOST_FIGURES limits. The process group has the same limit,
        # so that the watchdog of the hung rank, which knows the test, expires first.
        self._patience = timedelta(seconds=asked.timeout_s * MOST_FIGURES)
        self._part = RankMeasurements(
            rank=RankResult(
                rank=attempt.rank,
                local_rank=attempt.local_rank,
                node=0,
                host=socket.gethostname(),
                device=str(device),
                device_name=torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU",
            )
        )

    def run(self) -> None:
        """All tests, in order."""
        # Groups are created first and by all ranks in the same order, as torch.distributed requires.
        with self._limit_collective_part("the rendezvous of the ranks"):
            # State after this block: all ranks of all nodes have met and all groups exist. A rank that is missing
            # fails here, within one limit, and not in the first measurement.
            everyone = join_all_ranks(self._attempt, self._device, self._patience)
            nodes = list_nodes(self._attempt.rank - self._attempt.local_rank, everyone)
            groups = [
                create_group(scope, members, everyone, self._patience)
                for scope, members in measurements.list_collective_groups(self._asked, nodes)
            ]
            leads = create_group("all", [tuple(ranks[0] for ranks in nodes)], everyone, self._patience)
        self._bind_to_node(nodes)
        self._test_device(everyone)
        if "collectives" in self._asked.tests:
            for group in groups:
                self._test_collectives(group, everyone)
        if "pairs" in self._asked.tests:
            self._test_pairs(groups[0], everyone, max(map(len, nodes)), between_nodes=False)
            self._test_pairs(leads, everyone, len(nodes), between_nodes=True)
        self._test_endurance(everyone)
        self._write_part(rank=structs.replace(self._part.rank, is_complete=True))
        with self._limit_collective_part("collecting the results"):
            self._gather_results(everyone)

    def keep_problem(self, error: PrimusError) -> None:
        """Record why the tests ended early."""
        self._write_part(rank=structs.replace(self._part.rank, problem=error.problem))

    def close(self) -> None:
        """Leave the process group; with NCCL this may wait for ranks that have exited, until the process exits."""
        if dist.is_initialized() and (self._device.type == "cpu" or not self._part.rank.problem):
            dist.destroy_process_group()

    def _handle_expiry(self, error: PrimusError) -> None:
        # Called by the watchdog in its own thread: writes files only, without any collective.
        self.keep_problem(error)
        self._attempt.record_failure(error, EXIT_TIMED_OUT)

    @contextmanager
    def _limit_collective_part(self, what: str, num_parts: int = 1) -> Iterator[None]:
        """Run a step that needs the other ranks."""
        self._num_tests += 1
        self._attempt.beat("test", self._num_tests)
        with self._watchdog.limit_time(what, num_parts):
            try:
                yield
            # torch.distributed reports a lost peer as RuntimeError; other exceptions are bugs and keep their
            # traceback.
            except RuntimeError as error:
                raise PrimusError(
                    f"{what}: {read_first_line(error)}",
                    "a rank exited or is not reachable: see the logs of the other ranks and check the network settings",
                ) from error

    def _bind_to_node(self, nodes: Sequence[tuple[int, ...]]) -> None:
        """Record this rank's node, and use its share of the cores."""
        node = next(number for number, ranks in enumerate(nodes) if self._attempt.rank in ranks)
        self._num_local = len(nodes[node])
        if self._device.type == "cpu":
            torch.set_num_threads(max(1, count_usable_cpus() // self._num_local))
        self._write_part(rank=structs.replace(self._part.rank, node=node))

    def _test_device(self, everyone: RankGroup) -> None:
        """Tests that each rank runs on its own, concurrently with the others."""
        for name in (name for name in measurements.DEVICE_TESTS if name in self._asked.tests):
            with self._limit_collective_part(f"waiting for all ranks before test {name}", MOST_FIGURES):
                # The barrier waits MOST_FIGURES limits: a slow rank may use one limit for each figure of the previous
                # test.
                collectives.barrier(everyone)
            figures = self._measure_figures(name)
            while self._test_next(name, figures):
                continue

    def _test_next(self, name: str, figures: Iterator[MeasuredFigure]) -> bool:
        """Run the test up to its next figure; returns False if there is none. A failing device gives a figure with a
        problem, and other ranks continue."""
        with self._watchdog.limit_time(f"test {name} on {self._device}"):
            try:
                figure = next(figures, None)
            except RuntimeError as error:
                self._keep_figure(MeasuredFigure(test=name, problem=read_first_line(error)))
                return False
        if figure is not None:
            self._keep_figure(figure)
        return figure is not None

    def _measure_figures(self, name: str) -> Iterator[MeasuredFigure]:
        full = FULL if name == "gemm" else LONG_ENOUGH
        measured = MeasuredDevice(
            device=self._device,
            clock=self._clock,
            effort=limit_effort(QUICK if self._asked.is_quick else full, self._asked.timeout_s),
            cache_bytes=find_cache_bytes(self._device, self._asked.last_level_cache_bytes),
            max_bytes=find_array_bytes(self._device, self._num_local, is_quick=self._asked.is_quick),
        )
        if name == "sanity":
            yield _check_sanity(self._device)
        elif name == "gemm":
            yield gemm.run(measured, self._asked.gemm_size, self._asked.dtype)
        elif name == "kernels":
            if self._workload.try_kernels is not None:
                yield _count_right_kernels(self._workload.try_kernels(self._device))
        elif name == "memory":
            yield from memory.run(measured)
        elif self._device.type == "cuda":
            yield from memory.measure_host_copies(measured, COPY_BYTES)
            peer = memory.find_peer(self._attempt.local_rank, self._num_local)
            if peer is not None and self._num_local <= torch.cuda.device_count():
                yield memory.peer_copy(measured, torch.device("cuda", peer), COPY_BYTES)

    def _test_endurance(self, everyone: RankGroup) -> None:
        """The long tests, which load all devices of all nodes concurrently."""
        place = endurance.EnduranceContext(self._attempt, self._asked, self._device, self._num_local, self._workload)
        for name in (name for name in measurements.SOAK_TESTS if name in self._asked.tests):
            with self._limit_collective_part(f"waiting for all ranks before test {name}", MOST_FIGURES):
                collectives.barrier(everyone)
            num_limits = 1 + math.ceil(endurance.duration_s(name, self._asked) / self._asked.timeout_s)
            with self._watchdog.limit_time(f"test {name} on {self._device}", num_limits):
                try:
                    endurance.run(name, place, self._part.rank, lambda rank: self._write_part(rank=rank))
                except RuntimeError as error:
                    self._keep_figure(MeasuredFigure(test=name, problem=read_first_line(error)))
            # A signal ends the tests here, between two parts, so that all ranks leave at the same place.
            if self._attempt.stop_signal:
                raise PrimusError(f"interrupted by {self._attempt.stop_signal}", "partial results are reported")

    def _test_collectives(self, group: RankGroup | None, everyone: RankGroup) -> None:
        """Every operation in every size; all groups run in step, so that no rank waits longer than the limit."""
        longest_s = min(LONGEST_QUICK_S if self._asked.is_quick else LONGEST_S, self._asked.timeout_s / 4)
        for name in collectives.OPERATIONS:
            own_sizes = self._asked.ring_sizes_bytes if name == "send_recv" else ()
            for size_bytes in sorted(own_sizes or self._asked.sizes_bytes):
                found = None
                with self._limit_collective_part(f"{name} of {table.format_size(size_bytes)}{_format_scope(group)}"):
                    if group:
                        found = collectives.run(name, size_bytes, group, longest_s)
                    # All groups finish a size before any starts the next, so that groups do not disturb each other
                    # and a hang is attributed to one operation and size.
                    collectives.barrier(everyone)
                if group and found and group.member == 0:
                    self._write_part(collectives=(*self._part.collectives, found))
                    if group.size > 1:
                        self._attempt.say(_format_collective(found))

    def _test_pairs(self, group: RankGroup | None, everyone: RankGroup, largest: int, *, between_nodes: bool) -> None:
        """All pairs of members, with as many concurrent pairs as possible; groups up to the `largest` run in step."""
        meetings = list_pair_rounds(group.size) if group else []
        pairs: list[Pair] = []
        # Groups of different sizes have different numbers of rounds. A rank without a pair, or without a group, waits
        # in the barrier of each round, so that all ranks count the same rounds.
        for number in range(len(list_pair_rounds(largest))):
            with self._limit_collective_part(
                f"round {number} of the pairs of {largest} {'nodes' if between_nodes else 'ranks'}"
            ):
                if group and number < len(meetings):
                    pairs += scan.run_round(
                        number, meetings[number], group, self._asked.pair_bytes, between_nodes=between_nodes
                    )
                collectives.barrier(everyone)
        if group and group.member == 0 and pairs:
            self._write_part(pairs=(*self._part.pairs, *pairs))
            self._attempt.say(f"pairs of {'nodes' if between_nodes else 'a node'}: {_format_slowest(pairs)}")

    def _gather_results(self, everyone: RankGroup) -> None:
        """Collect the results of all ranks; rank 0 writes them."""
        parts: list[RankMeasurements | None] = [self._part]
        if everyone.size > 1:
            parts = [None] * everyone.size
            # Over the network and not through the run folder, which the nodes may not share.
            dist.all_gather_object(parts, self._part, group=everyone.handle)
        if self._attempt.rank > 0:
            return
        results = measurements.merge_measurements(self._asked, everyone.size, [part for part in parts if part])
        results = structs.replace(
            results,
            backend=dist.get_backend() if everyone.size > 1 else "",
            libraries=read_library_versions(),
            duration_s=time.monotonic() - self._started,
        )
        write_json(self._attempt.run.directory / measurements.FILE, results)
        self._attempt.event("preflight_measured", duration_s=results.duration_s)

    def _keep_figure(self, figure: MeasuredFigure) -> None:
        self._write_part(rank=structs.replace(self._part.rank, figures=(*self._part.rank.figures, figure)))
        shown = (
            f"{table.format_number(figure.value)} {figure.unit}"
            if figure.value is not None
            else figure.problem or "done"
        )
        self._attempt.say(f"{figure.test}: {shown}")
        if self._device.type == "cuda":
            # Memory that the allocator keeps would reduce the arrays of the next test, whose size depends on free
            # memory.
            torch.cuda.empty_cache()

    def _write_part(self, **changes: object) -> None:
        # The whole part is replaced by rename after each result: the last state is readable
        # however the process ends.
        self._part = structs.replace(self._part, **changes)
        write_json(self._attempt.run.directory / measurements.find_measurements_file(self._attempt.rank), self._part)


def _check_sanity(device: torch.device) -> MeasuredFigure:
    """Checks that memory can be allocated and that a small product is correct; the value is the free memory."""
    free_bytes = find_free_bytes(device)
    size = SANITY_SIZES[device.type]
    checked = gemm.create_operands(device, gemm.GemmShape(size, size, size), "bf16", 1)[0]
    gemm.multiply_matrices(*checked)
    wrong = gemm.wrong_elements(checked)
    return MeasuredFigure(
        test="sanity",
        value=free_bytes / 1e9,
        unit="GB free",
        convention=f"one bf16 product of {size} x {size} against fp64",
        wrong=wrong,
        problem=f"{wrong} wrong elements in a small product" if wrong else "",
    )


def _count_right_kernels(tried: Sequence[tuple[str, str]]) -> MeasuredFigure:
    """How many kernels of training are right, and what is wrong with the others."""
    problems = [f"{name} {problem}" for name, problem in tried if problem]
    return MeasuredFigure(
        test="kernels",
        value=len(tried) - len(problems),
        unit="kernels right",
        convention="forward and backward against float64, in memory that held NaN",
        wrong=len(problems),
        problem="; ".join(problems),
    )


def _format_scope(group: RankGroup | None) -> str:
    return f" among {group.size} ranks" if group else ""


def _format_collective(found: Collective) -> str:
    what = f"{found.operation} of {table.format_size(found.size_bytes)} among {len(found.ranks)} ranks"
    if found.busbw_gb_per_s is None:
        return f"{what}: {found.problem}"
    wrong = sum(entry.count for entry in found.wrong)
    bandwidth = (
        f"algbw {table.format_number(found.algbw_gb_per_s)}, busbw {table.format_number(found.busbw_gb_per_s)} GB/s"
    )
    return f"{what}: {bandwidth}, {wrong} wrong elements"


def _format_slowest(pairs: Sequence[Pair]) -> str:
    pair = min(pairs, key=lambda pair: pair.gb_per_s or 0.0)
    return f"slowest is rank {pair.first} with {pair.second}, {table.format_number(pair.gb_per_s)} GB/s"
