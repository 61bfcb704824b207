"""Plan and results of measurements on a machine: values that workers write and reports read.

Times are seconds, sizes bytes, rates 1e9 B/s (GB/s) or 1e12 FLOP/s (TFLOP/s).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Literal, TypeVar

from msgspec import Struct, field

from primus.machine.facts import DeviceKind

Dtype = Literal["fp32", "bf16", "fp16"]
Member = TypeVar("Member")
Scope = Literal["node", "all"]
"""Processes of one node, or all processes of all nodes."""

DEVICE_TESTS = ("sanity", "gemm", "memory", "copies", "kernels")
GROUP_TESTS = ("collectives", "pairs")
TESTS = DEVICE_TESTS + GROUP_TESTS
SOAK_TESTS = ("host_memory", "quickstart", "burn_in")
"""Additional tests of `--level soak`."""
NODE_TESTS = ("rdma", "storage")
"""Tests without PyTorch processes; also run by `--level soak`."""
ALL_TESTS = TESTS + SOAK_TESTS + NODE_TESTS

FILE = "report/performance.json"
"""Results collected by rank 0, in the run folder; missing if the tests ended early."""


class MeasurementPlan(Struct, frozen=True, kw_only=True):
    """Measurements that the workers run; `config/preflight.json` of their run."""

    tests: tuple[str, ...] = TESTS
    """Names from ALL_TESTS, in the order of execution."""
    sizes_bytes: tuple[int, ...]
    """Sizes of the collectives, by the convention of nccl-tests the bytes of the largest side."""
    ring_sizes_bytes: tuple[int, ...] = ()
    """Sizes of send_recv in a ring; empty for those of the other collectives."""
    pair_bytes: int
    """Message of the pair scan."""
    intra_group_sizes: tuple[int, ...] = ()
    """Collectives also run in groups of this many ranks of a node."""
    inter_group_sizes: tuple[int, ...] = ()
    """Collectives also run among all ranks of this many nodes."""
    gemm_size: int
    """M, N and K."""
    dtype: Dtype = "bf16"
    """Data type of the matrix product; collectives and memory use fp32."""
    device: DeviceKind = "auto"
    """Device to measure (see machine/accelerators.py)."""
    is_quick: bool = False
    """Whether to use short times and small arrays, which gives noisier results."""
    timeout_s: float = 120.0
    """Time limit of each test, and of the rendezvous."""
    last_level_cache_bytes: int | None = None
    """From the device's profile; if None, the test reads it or uses the largest known size."""
    burn_in_s: float = 600.0
    """Duration of the burn-in."""


class Timing(Struct, frozen=True, kw_only=True):
    """Times of one call, in seconds."""

    n: int
    """Samples."""
    calls: int = 1
    """Calls in each sample; more than one if a single call is too short for the clock."""
    median_s: float
    p5_s: float
    p95_s: float
    min_s: float
    max_s: float
    mad_s: float
    """Median absolute deviation from the median."""
    interval_s: tuple[float, float] | None = None
    """95 % confidence interval of the median."""
    wall_s: float | None = None
    """Mean time of one call by the host's clock; the difference from the device's clock is launch overhead."""
    is_settled: bool = True
    """Whether times became steady before the limit of the warm-up."""


class MeasuredFigure(Struct, frozen=True, kw_only=True):
    """The result of one test on one device."""

    test: str
    """``sanity``, ``gemm_bf16``, ``memory_copy``, ``memory_triad``, ``host_to_device``: as in a profile's floors."""
    value: float | None = None
    """None if it could not be measured."""
    unit: str = ""
    convention: str = ""
    """Counted operations and their data: ``2MNK / median, M=N=K=8192, normal random, 3 rotating sets``."""
    timing: Timing | None = None
    wrong: int = 0
    """Number of wrong elements in the result."""
    problem: str = ""
    """Reason for a missing or wrong value."""


class WrongElements(Struct, frozen=True, kw_only=True):
    """Wrong elements that a rank received."""

    rank: int
    """Global rank of the receiver."""
    source: int | None = None
    """Global rank of the sender; None for a sum of all ranks."""
    count: int


class Collective(Struct, frozen=True, kw_only=True):
    """One collective operation of one size in one group, by the conventions of nccl-tests."""

    operation: str
    """``all_reduce``, ``all_gather``, ``reduce_scatter``, ``all_to_all``, ``broadcast``, ``send_recv``."""
    scope: Scope
    ranks: tuple[int, ...]
    """Global ranks of the group."""
    size_bytes: int
    """Bytes of the largest side, as measured: rounded to whole elements for every rank."""
    iterations: int = 0
    time_s: float | None = None
    """Time of the slowest rank."""
    rank_times_s: tuple[float, ...] = ()
    algbw_gb_per_s: float | None = None
    busbw_gb_per_s: float | None = None
    """None for a single rank, for which it is not defined."""
    wrong: tuple[WrongElements, ...] = ()
    problem: str = ""
    """Reason for a missing time: ``not offered by gloo``, ``single rank``."""


class Pair(Struct, frozen=True, kw_only=True):
    """Two ranks that exchanged messages."""

    first: int
    second: int
    """Global ranks."""
    round: int
    """Pairs of a round run concurrently."""
    between_nodes: bool
    size_bytes: int
    gb_per_s: float | None = None
    """Per direction."""
    wrong: int = 0
    problem: str = ""


class LoadWindow(Struct, frozen=True, kw_only=True):
    """A part of a burn-in."""

    begin_s: float
    """Since the start of the burn-in."""
    tflops: float
    """Rate of the products with their checks."""


class BurnIn(Struct, frozen=True, kw_only=True):
    """Result of the burn-in of one device."""

    key: str
    """Devices with the same key compute the same bits."""
    digest: str
    """Checksum of the first products."""
    duration_s: float = 0.0
    products: int = 0
    wrong_at_first: int = 0
    """Elements of the first products that differ from fp64 beyond rounding."""
    wrong_words: int = 0
    """Elements of later products that differ in any bit from the first product."""
    wrong_memory: int = 0
    """Words of memory that lost their pattern."""
    first_wrong_s: float | None = None
    """End of the first window with an error."""
    windows: tuple[LoadWindow, ...] = ()


class ReferenceTraining(Struct, frozen=True, kw_only=True):
    """Result of a small deterministic training on one device."""

    key: str
    """Devices with the same key compute the same bits."""
    digest: str
    """Checksum of all losses and of the weights at the end."""
    last_loss: float | None = None
    """None if it is not finite."""


class Telemetry(Struct, frozen=True, kw_only=True):
    """State of a GPU under load; None if no source has a value."""

    gpu: int = field(name="card")  # the key in run folders
    """Index among the GPUs of the node."""
    num_samples: int
    clock_min_mhz: float | None = None
    clock_mean_mhz: float | None = None
    power_mean_w: float | None = None
    power_max_w: float | None = None
    temperature_max_c: float | None = None
    throttled: dict[str, int] = {}
    """Samples in which the clock was throttled, by reason."""
    new_uncorrectable: int | None = None
    """Uncorrectable memory errors between the first and the last sample."""


class RankResult(Struct, frozen=True, kw_only=True):
    """Results of one rank, and its place in the job."""

    rank: int
    local_rank: int
    node: int
    """Number of its node, from 0."""
    host: str
    device: str
    """``cuda:3`` or ``cpu``."""
    device_name: str
    figures: tuple[MeasuredFigure, ...] = ()
    problem: str = ""
    """Reason why the tests ended early; empty if all have run."""
    trainings: tuple[ReferenceTraining, ...] = ()
    """The same training several times."""
    burn_in: BurnIn | None = None
    telemetry: tuple[Telemetry, ...] = ()
    """For all GPUs of the node; only on its first rank."""
    is_complete: bool = False
    """Whether all planned tests have run, successfully or not."""


class RankMeasurements(Struct, frozen=True, kw_only=True):
    """Everything that one rank reports: its own results, and those of the groups that it leads."""

    rank: RankResult
    collectives: tuple[Collective, ...] = ()
    pairs: tuple[Pair, ...] = ()


class MeasurementResults(Struct, frozen=True, kw_only=True):
    """All results of a run's workers; incomplete if workers ended early."""

    asked: MeasurementPlan
    world_size: int
    backend: str = ""
    """``nccl`` or ``gloo``."""
    libraries: dict[str, str] = {}
    """Versions by name: torch, nccl, cuda, hip."""
    ranks: tuple[RankResult, ...] = ()
    collectives: tuple[Collective, ...] = ()
    pairs: tuple[Pair, ...] = ()
    duration_s: float | None = None
    problem: str = ""
    """Reason why the tests ended early; empty if all have run."""


def find_measurements_file(rank: int) -> str:
    """Path of a rank's results in the run folder."""
    return f"report/performance/rank_{rank}.json"


def merge_measurements(
    asked: MeasurementPlan, world_size: int, parts: Iterable[RankMeasurements]
) -> MeasurementResults:
    """The results of all ranks in order; `problem` names missing ranks, or what ended the tests."""
    ordered = sorted(parts, key=lambda part: part.rank.rank)
    missing = sorted(set(range(world_size)) - {part.rank.rank for part in ordered})
    problems = [f"rank {part.rank.rank}: {part.rank.problem}" for part in ordered if part.rank.problem]
    if missing:
        problems.append(f"no results of rank {', '.join(map(str, missing))}")
    return MeasurementResults(
        asked=asked,
        world_size=world_size,
        ranks=tuple(part.rank for part in ordered),
        collectives=tuple(collective for part in ordered for collective in part.collectives),
        pairs=tuple(pair for part in ordered for pair in part.pairs),
        problem="; ".join(problems),
    )


def list_collective_groups(
    asked: MeasurementPlan, nodes: Sequence[tuple[int, ...]]
) -> list[tuple[Scope, list[tuple[int, ...]]]]:
    """Groups of ranks that run collectives; groups of one entry run concurrently, and a rank may be in none of them.

    Args:
        nodes: Ranks of each node.
    """
    found: list[tuple[Scope, list[tuple[int, ...]]]] = [("node", list(nodes))]
    for size in asked.intra_group_sizes:
        parts = [part for ranks in nodes if size < len(ranks) for part in _divide_members(ranks, size)]
        found.append(("node", [part for part in parts if len(part) > 1]))
    for size in asked.inter_group_sizes:
        some = [part for part in _divide_members(nodes, size) if len(part) > 1] if size < len(nodes) else []
        found.append(("all", [tuple(itertools.chain(*part)) for part in some]))
    if len(nodes) > 1:
        found.append(("all", [tuple(itertools.chain(*nodes))]))
    return [(scope, members) for scope, members in found if members]


def _divide_members(members: Sequence[Member], size: int) -> list[tuple[Member, ...]]:
    return [tuple(members[first : first + size]) for first in range(0, len(members), size)]


def list_pair_rounds(n: int) -> list[list[tuple[int, int]]]:
    """Rounds of disjoint pairs in which every two of `n` members are paired exactly once.

    The circle method: member 0 is fixed, the others rotate by one position per round. For odd `n` a dummy member is
    added, and its partner pauses. There are n - 1 rounds for even n, n rounds for odd n.
    """
    places: list[int | None] = [*range(n), *([None] if n % 2 else [])]
    found = []
    for _ in range(len(places) - 1):
        half = len(places) // 2
        facing = zip(places[:half], reversed(places[half:]), strict=True)
        found.append([(min(a, b), max(a, b)) for a, b in facing if a is not None and b is not None])
        places = [places[0], places[-1], *places[1:-1]]
    return found if n > 1 else []
