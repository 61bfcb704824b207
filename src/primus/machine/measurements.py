"""What was to be measured on a machine, and what came out: values that workers write and reports read.

Times are seconds, sizes bytes, rates 1e9 B/s (GB/s) or 1e12 FLOP/s (TFLOP/s).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Literal, TypeVar

from msgspec import Struct

from primus.machine.facts import DeviceKind

Dtype = Literal["fp32", "bf16", "fp16"]
Member = TypeVar("Member")
Scope = Literal["node", "all"]
"""Processes of each node among themselves, or all processes of all nodes."""

DEVICE_TESTS = ("sanity", "gemm", "memory", "copies")
GROUP_TESTS = ("collectives", "pairs")
TESTS = DEVICE_TESTS + GROUP_TESTS
SOAK_TESTS = ("host_memory", "quickstart", "burn_in")
"""Those of `--level soak` besides."""
NODE_TESTS = ("rdma", "storage")
"""Those that need no process of PyTorch: of `--level soak` as well."""
ALL_TESTS = TESTS + SOAK_TESTS + NODE_TESTS

FILE = "report/performance.json"
"""What rank 0 gathered, in the run folder; absent where the tests ended early."""


class MeasurementPlan(Struct, frozen=True, kw_only=True):
    """What the workers shall measure; `config/preflight.json` of their run."""

    tests: tuple[str, ...] = TESTS
    """Names from ALL_TESTS, run in that order."""
    sizes_bytes: tuple[int, ...]
    """Sizes of the collectives, by the convention of nccl-tests the bytes of the largest side."""
    ring_sizes_bytes: tuple[int, ...] = ()
    """Sizes of what goes round in a ring (send_recv); those of the other collectives where there are none."""
    pair_bytes: int
    """Message of the pair scan."""
    intra_group_sizes: tuple[int, ...] = ()
    """Collectives run among so many ranks of a node as well."""
    inter_group_sizes: tuple[int, ...] = ()
    """Collectives run among all ranks of so many nodes as well."""
    gemm_size: int
    """M, N and K."""
    dtype: Dtype = "bf16"
    """Of the matrix product; collectives and memory use fp32."""
    device: DeviceKind = "auto"
    """What is measured (see machine/accelerators.py)."""
    is_quick: bool = False
    """Whether short times and small arrays do, at the price of noise."""
    timeout_s: float = 120.0
    """Limit of each test, and of the ranks' meeting."""
    last_level_cache_bytes: int | None = None
    """Of a device, from its profile; None has the test look, or take the largest known."""
    burn_in_s: float = 600.0
    """How long the burn-in loads the devices."""


class Timing(Struct, frozen=True, kw_only=True):
    """Times of one call, in seconds."""

    n: int
    """Samples."""
    calls: int = 1
    """Calls in each sample: more than one where a single call is too short for the clock."""
    median_s: float
    p5_s: float
    p95_s: float
    min_s: float
    max_s: float
    mad_s: float
    """Median absolute deviation from the median."""
    wall_s: float | None = None
    """Mean of one call by the host's clock; its distance from the device's is launch overhead."""
    is_settled: bool = True
    """Whether the warm-up ended in steady times rather than at its limit."""


class MeasuredFigure(Struct, frozen=True, kw_only=True):
    """The result of one test on one device."""

    test: str
    """``sanity``, ``gemm_bf16``, ``memory_copy``, ``memory_triad``, ``host_to_device``: as in a profile's floors."""
    value: float | None = None
    """None where it could not be measured."""
    unit: str = ""
    convention: str = ""
    """What was counted, and on which data: ``2MNK / median, M=N=K=8192, normal random, 3 rotating sets``."""
    timing: Timing | None = None
    wrong: int = 0
    """Elements of the result that are not what they must be."""
    problem: str = ""
    """Why there is no value, or what is wrong with it."""


class WrongElements(Struct, frozen=True, kw_only=True):
    """Elements that a rank received and that are not what they must be."""

    rank: int
    """Global rank of the receiver."""
    source: int | None = None
    """Global rank that they came from; None for a sum, which comes from all."""
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
    """Of the slowest rank."""
    rank_times_s: tuple[float, ...] = ()
    algbw_gb_per_s: float | None = None
    busbw_gb_per_s: float | None = None
    """None for a single rank, where it has no meaning."""
    wrong: tuple[WrongElements, ...] = ()
    problem: str = ""
    """Why there is no time: ``not offered by gloo``, ``single rank``."""


class Pair(Struct, frozen=True, kw_only=True):
    """Two ranks that sent to each other at once."""

    first: int
    second: int
    """Global ranks."""
    round: int
    """Pairs of a round ran at the same time."""
    between_nodes: bool
    size_bytes: int
    gb_per_s: float | None = None
    """Per direction."""
    wrong: int = 0
    problem: str = ""


class LoadWindow(Struct, frozen=True, kw_only=True):
    """A part of a burn-in."""

    begin_s: float
    """Since the burn-in began."""
    tflops: float
    """Rate of the products with their checks."""


class BurnIn(Struct, frozen=True, kw_only=True):
    """What a burn-in of one device found."""

    key: str
    """Devices with the same key compute the same bits."""
    digest: str
    """Checksum of the first products."""
    duration_s: float = 0.0
    products: int = 0
    wrong_at_first: int = 0
    """Elements of the first products that differ from fp64 beyond rounding."""
    wrong_words: int = 0
    """Elements of later products that differ from the first ones in some bit."""
    wrong_memory: int = 0
    """Words of memory that lost their pattern."""
    first_wrong_s: float | None = None
    """When something was wrong first, to the end of its window."""
    windows: tuple[LoadWindow, ...] = ()


class ReferenceTraining(Struct, frozen=True, kw_only=True):
    """A small training in a fixed way on one device."""

    key: str
    """Devices with the same key compute the same bits."""
    digest: str
    """Of all losses and of the weights at the end."""
    last_loss: float | None = None
    """None where it is not finite."""


class Telemetry(Struct, frozen=True, kw_only=True):
    """A card of a node while it was loaded; None where no source states a value."""

    card: int
    """Index among the cards of the node."""
    num_samples: int
    clock_min_mhz: float | None = None
    clock_mean_mhz: float | None = None
    power_mean_w: float | None = None
    power_max_w: float | None = None
    temperature_max_c: float | None = None
    throttled: dict[str, int] = {}
    """Samples in which the clock was held down, by reason."""
    new_uncorrectable: int | None = None
    """Uncorrectable errors of its memory from the first sample to the last."""


class RankResult(Struct, frozen=True, kw_only=True):
    """What one rank measured by itself, and where it stands."""

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
    """Why its tests ended early."""
    trainings: tuple[ReferenceTraining, ...] = ()
    """The same training several times."""
    burn_in: BurnIn | None = None
    telemetry: tuple[Telemetry, ...] = ()
    """Of all cards of the node, by its first rank."""
    is_complete: bool = False
    """Whether all tests that were asked for are behind it, well or badly."""


class RankMeasurements(Struct, frozen=True, kw_only=True):
    """What one rank has to tell: its own results, and those of the groups that it leads."""

    rank: RankResult
    collectives: tuple[Collective, ...] = ()
    pairs: tuple[Pair, ...] = ()


class MeasurementResults(Struct, frozen=True, kw_only=True):
    """All that the workers of a run measured; parts are missing where they ended early."""

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
    """Why the tests ended early; empty where all were done."""


def find_measurements_file(rank: int) -> str:
    """Where a rank leaves its part, in the run folder."""
    return f"report/performance/rank_{rank}.json"


def merge_measurements(
    asked: MeasurementPlan, world_size: int, parts: Iterable[RankMeasurements]
) -> MeasurementResults:
    """The results of all ranks in order; `problem` names the ranks that are missing, or what ended the tests."""
    told = sorted(parts, key=lambda part: part.rank.rank)
    missing = sorted(set(range(world_size)) - {part.rank.rank for part in told})
    problems = [f"rank {part.rank.rank}: {part.rank.problem}" for part in told if part.rank.problem]
    if missing:
        problems.append(f"no results of rank {', '.join(map(str, missing))}")
    return MeasurementResults(
        asked=asked,
        world_size=world_size,
        ranks=tuple(part.rank for part in told),
        collectives=tuple(collective for part in told for collective in part.collectives),
        pairs=tuple(pair for part in told for pair in part.pairs),
        problem="; ".join(problems),
    )


def list_collective_groups(
    asked: MeasurementPlan, nodes: Sequence[tuple[int, ...]]
) -> list[tuple[Scope, list[tuple[int, ...]]]]:
    """Groups of ranks that run collectives, those of one entry at the same time; a rank may be in none of them.

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
    """Rounds of pairs that can run at once, in which each two of `n` members meet exactly once.

    The circle method: member 0 stays, the others move on by one place a round; where `n` is odd, the one that meets
    the empty place rests. n - 1 rounds, n where it is odd.
    """
    places: list[int | None] = [*range(n), *([None] if n % 2 else [])]
    found = []
    for _ in range(len(places) - 1):
        half = len(places) // 2
        facing = zip(places[:half], reversed(places[half:]), strict=True)
        found.append([(min(a, b), max(a, b)) for a, b in facing if a is not None and b is not None])
        places = [places[0], places[-1], *places[1:-1]]
    return found if n > 1 else []
