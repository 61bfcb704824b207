"""Bandwidth and correctness of collectives, by the conventions of nccl-tests.

S is the bytes of the largest side, n the ranks, t the time of the slowest rank: algbw = S / t, and busbw = algbw times
a factor of the operation, which makes it comparable with the bandwidth of a link (NVIDIA/nccl-tests,
doc/PERFORMANCE.md)."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
import torch.distributed as dist
from msgspec import structs

from primus.machine.measurements import Collective, Scope, WrongElements
from primus.measure.timing import Clock, create_clock

DTYPE = torch.float32
WARM_UP_CALLS = 5
CALLS = 20
CALLS_OF_SMALL = 100
SMALL_BYTES = 2**20
"""nccl-tests' defaults are 5 and 20; calls of microseconds are repeated more often."""
FEWEST_CALLS = 2
CHUNK = 2**24
"""Elements filled or checked at a time."""
CODES = 8191
"""A prime, so that codes of different ranks differ; fp32 represents each exactly."""
SMALL_CODES = 251
"""The same for bf16, which represents integers up to 256."""


class RankGroup(NamedTuple):
    """Processes that take part in a measurement."""

    scope: Scope
    ranks: tuple[int, ...]
    """Global ranks."""
    member: int
    """Index of this process in the group."""
    device: torch.device
    handle: dist.ProcessGroup | None
    """None for a single process."""

    @property
    def size(self) -> int:
        return len(self.ranks)


class Buffers(NamedTuple):
    """Buffers that one rank sends and receives."""

    send: torch.Tensor
    receive: torch.Tensor


Launch = Callable[[Buffers, RankGroup], None]
Rank = int | torch.Tensor
Values = Callable[[torch.Tensor], torch.Tensor]
"""Computes the values of elements from their indices."""


class Operation(NamedTuple):
    """A collective operation; `send` and `expected` describe buffers of `share` elements a rank."""

    bus_factor: Callable[[int], float]
    sends_all: bool
    """Whether a rank sends S bytes rather than its share S / n."""
    receives_all: bool
    launch: Launch
    send: Callable[[int, int, int], Values]
    """Values by rank, number of ranks and elements of a share."""
    expected: Callable[[int, int, int], Values]
    source: Callable[[int, int], int | None] = lambda member, n: None
    """The sender of everything that a rank receives; None if all ranks send."""
    in_place: Callable[[int], bool] = lambda member: False
    """Whether a rank's contribution is in its receive buffer, which some torch functions require."""
    by_share: bool = False
    """Whether share i of the received buffer came from rank i."""
    reduces: bool = False
    """Whether ranks receive sums."""


def encode_element(source: Rank, destination: Rank, index: torch.Tensor) -> torch.Tensor:
    """A small integer that encodes sender, receiver and element."""
    return (source * 61 + destination * 31 + index) % CODES


def compute_term(rank: int, index: torch.Tensor) -> torch.Tensor:
    """A rank's contribution to a sum: small integers, so that sums are exact in fp32 for any number of ranks."""
    return _compute_weight(rank) * (index % 5 + 1)


def _compute_weight(rank: int) -> int:
    return rank % 16 + 1


def _compute_sum(n: int, index: torch.Tensor) -> torch.Tensor:
    return sum(map(_compute_weight, range(n))) * (index % 5 + 1)


def make_sent_values(operation: Operation, dtype: torch.dtype, rank: int, n: int, share: int) -> Values:
    """What a rank sends; types with fewer digits than fp32 hold smaller integers."""
    if dtype == DTYPE:
        return operation.send(rank, n, share)
    if operation.reduces:
        return lambda i: (rank + i) % 2
    return lambda i: operation.send(rank, n, share)(i) % SMALL_CODES


def make_expected_values(operation: Operation, dtype: torch.dtype, rank: int, n: int, share: int) -> Values:
    """What a rank receives."""
    if dtype == DTYPE:
        return operation.expected(rank, n, share)
    if operation.reduces:
        # Half of the ranks send 1 for each element; of an odd number one more for odd elements.
        begin = 0 if operation.receives_all else rank * share
        return lambda i: n // 2 + (n % 2) * ((i + begin + n - 1) % 2)
    return lambda i: operation.expected(rank, n, share)(i) % SMALL_CODES


def _all_reduce(buffers: Buffers, group: RankGroup) -> None:
    dist.all_reduce(buffers.receive, group=group.handle)


def _all_gather(buffers: Buffers, group: RankGroup) -> None:
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # renamed in torch 2.13
    gather(buffers.receive, buffers.send, group=group.handle)


def _reduce_scatter(buffers: Buffers, group: RankGroup) -> None:
    scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    scatter(buffers.receive, buffers.send, group=group.handle)


def _all_to_all(buffers: Buffers, group: RankGroup) -> None:
    dist.all_to_all_single(buffers.receive, buffers.send, group=group.handle)


def _broadcast(buffers: Buffers, group: RankGroup) -> None:
    dist.broadcast(buffers.receive, group.ranks[0], group=group.handle)


def _send_recv(buffers: Buffers, group: RankGroup) -> None:
    exchange_messages(buffers, group, group.member + 1, group.member - 1)


def exchange_messages(buffers: Buffers, group: RankGroup, to: int, of: int) -> None:
    """Send to one member of the group and receive from another concurrently; member indices wrap around."""
    operations = [
        dist.P2POp(dist.isend, buffers.send, group.ranks[to % group.size], group.handle),
        dist.P2POp(dist.irecv, buffers.receive, group.ranks[of % group.size], group.handle),
    ]
    for work in dist.batch_isend_irecv(operations):
        work.wait()


def _compute_share_of_others(n: int) -> float:
    return (n - 1) / n


def _get_whole_factor(n: int) -> float:
    return 1.0


OPERATIONS: dict[str, Operation] = {
    "all_reduce": Operation(
        bus_factor=lambda n: 2 * (n - 1) / n,
        sends_all=True,
        receives_all=True,
        launch=_all_reduce,
        in_place=lambda member: True,
        reduces=True,
        send=lambda rank, n, share: lambda i: compute_term(rank, i),
        expected=lambda rank, n, share: lambda i: _compute_sum(n, i),
    ),
    "all_gather": Operation(
        bus_factor=_compute_share_of_others,
        sends_all=False,
        receives_all=True,
        launch=_all_gather,
        send=lambda rank, n, share: lambda i: encode_element(rank, 0, i),
        expected=lambda rank, n, share: lambda i: encode_element(i // share, 0, i % share),
        by_share=True,
    ),
    "reduce_scatter": Operation(
        bus_factor=_compute_share_of_others,
        sends_all=True,
        receives_all=False,
        launch=_reduce_scatter,
        reduces=True,
        send=lambda rank, n, share: lambda i: compute_term(rank, i),
        expected=lambda rank, n, share: lambda i: _compute_sum(n, i + rank * share),
    ),
    "all_to_all": Operation(
        bus_factor=_compute_share_of_others,
        sends_all=True,
        receives_all=True,
        launch=_all_to_all,
        send=lambda rank, n, share: lambda i: encode_element(rank, i // share, i % share),
        expected=lambda rank, n, share: lambda i: encode_element(i // share, rank, i % share),
        by_share=True,
    ),
    "broadcast": Operation(
        bus_factor=_get_whole_factor,
        sends_all=True,
        receives_all=True,
        launch=_broadcast,
        in_place=lambda member: member == 0,
        send=lambda rank, n, share: lambda i: encode_element(rank, 0, i),
        expected=lambda rank, n, share: lambda i: encode_element(0, 0, i),
        source=lambda member, n: 0,
    ),
    "send_recv": Operation(
        bus_factor=_get_whole_factor,
        sends_all=True,
        receives_all=True,
        launch=_send_recv,
        send=lambda rank, n, share: lambda i: encode_element(rank, rank + 1, i),
        expected=lambda rank, n, share: lambda i: encode_element((rank - 1) % n, (rank - 1) % n + 1, i),
        source=lambda member, n: (member - 1) % n,
    ),
}
"""Operations of nccl-tests that training uses; send_recv sends to the next rank and counts one direction."""


def compute_algorithm_bandwidth(size_bytes: int, time_s: float) -> float:
    """GB/s, 1e9 bytes."""
    return size_bytes / time_s / 1e9


def compute_bus_bandwidth(operation: str, size_bytes: int, time_s: float, n: int) -> float | None:
    """GB/s; None for a single rank, which has no bus."""
    return compute_algorithm_bandwidth(size_bytes, time_s) * OPERATIONS[operation].bus_factor(n) if n > 1 else None


def round_bytes(size_bytes: int, n: int, dtype: torch.dtype = DTYPE) -> int:
    """`size_bytes` in whole elements for each of `n` ranks, at least one."""
    return max(size_bytes // (dtype.itemsize * n), 1) * dtype.itemsize * n


def run(name: str, size_bytes: int, group: RankGroup, longest_s: float, launch: Launch | None = None) -> Collective:
    """Measure one operation of one size; every member of `group` gets the same result.

    The first call, on fresh buffers, is checked, since a buffer that is reduced repeatedly grows. All calls of the
    timed loop run on one stream.

    Args:
        name: One of OPERATIONS.
        size_bytes: Size of the largest side, rounded to whole elements for each rank.
        longest_s: Limit of the timed loop; fewer calls are made if they would exceed it.
        launch: Replaces the operation, for tests.
    """
    operation, n = OPERATIONS[name], group.size
    size_bytes = round_bytes(size_bytes, n)
    described = Collective(operation=name, scope=group.scope, ranks=group.ranks, size_bytes=size_bytes)
    if n == 1:
        return structs.replace(described, problem="single rank: no peer to communicate with")
    launch = launch or operation.launch
    buffers = create_fresh_buffers(operation, size_bytes, group)
    if problem := launch_first(launch, buffers, group):
        return structs.replace(described, problem=problem)
    # Checked before the timed loop, whose calls reduce the same buffers again.
    wrong = gather_wrong_elements(operation, buffers, group)
    calls = CALLS_OF_SMALL if size_bytes < SMALL_BYTES else CALLS
    calls, times_s = time_calls(lambda: launch(buffers, group), group, WARM_UP_CALLS, calls, longest_s)
    time_s = max(times_s)  # a collective has ended when its slowest rank has
    return structs.replace(
        described,
        iterations=calls,
        time_s=time_s,
        rank_times_s=tuple(times_s),
        algbw_gb_per_s=compute_algorithm_bandwidth(size_bytes, time_s),
        busbw_gb_per_s=compute_bus_bandwidth(name, size_bytes, time_s, n),
        wrong=tuple(wrong),
    )


def launch_first(launch: Launch, buffers: Buffers, group: RankGroup) -> str:
    """Make a first call, and give the reason if the backend does not offer the operation; else an empty text."""
    try:
        launch(buffers, group)
    except RuntimeError as error:
        # All ranks raise alike for an operation that the backend lacks, so none of them waits for the others.
        if "support" not in str(error).lower():
            raise
        return f"not offered by {dist.get_backend(group.handle)}: {error}"
    return ""


def create_fresh_buffers(
    operation: Operation, size_bytes: int, group: RankGroup, dtype: torch.dtype = DTYPE
) -> Buffers:
    """Buffers before the first call; elements that no rank sends hold -1."""
    n, all_elements = group.size, size_bytes // dtype.itemsize
    share = all_elements // n

    def empty(is_all: bool) -> torch.Tensor:
        return torch.full((all_elements if is_all else share,), -1.0, dtype=dtype, device=group.device)

    buffers = Buffers(empty(operation.sends_all), empty(operation.receives_all))
    values = make_sent_values(operation, dtype, group.member, n, share)
    for begin, index in _iterate_chunks(buffers.send):
        buffers.send[begin : begin + len(index)] = values(index).to(dtype)
    if operation.in_place(group.member):
        buffers.receive.copy_(buffers.send)
    return buffers


def count_wrong(received: torch.Tensor, expected: Values, begin: int = 0) -> int:
    """Number of wrong elements in `received`, whose first element has the index `begin`."""
    wrong = 0
    for offset, index in _iterate_chunks(received):
        wrong += int((received[offset : offset + len(index)] != expected(index + begin).to(received.dtype)).sum())
    return wrong


def time_calls(
    call: Callable[[], object], group: RankGroup, warm_up_calls: int, calls: int, longest_s: float
) -> tuple[int, list[float]]:
    """Number of calls, equal on all ranks, and each rank's seconds per call."""
    clock = create_clock(group.device)
    warm_s = max(time_loop(call, clock, warm_up_calls, group))
    # Every rank computes the same number from the slowest rank's time: a different number of calls would deadlock.
    calls = max(FEWEST_CALLS, min(calls, math.ceil(longest_s / warm_s)))
    return calls, time_loop(call, clock, calls, group)


def barrier(group: RankGroup) -> None:
    """Wait for all members."""
    # The gathered values are read on the host, so the device's queue is empty afterwards as well.
    gather_from_all(0.0, group)


def gather_from_all(value: float, group: RankGroup) -> list[float]:
    """The value of each member, in the order of the group."""
    if group.size == 1:
        return [value]
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    every = torch.empty(group.size, dtype=torch.float64, device=group.device)
    gather(every, torch.tensor([value], dtype=torch.float64, device=group.device), group=group.handle)
    return every.tolist()


def time_loop(call: Callable[[], object], clock: Clock, calls: int, group: RankGroup) -> list[float]:
    """Seconds per call of each rank; all ranks start together."""
    # Without a common start the first call would measure how late the last rank is.
    barrier(group)
    started = time.perf_counter()
    begin = clock.record_mark()
    for _ in range(calls):
        call()
    # The loop only queues work; one wait at the end keeps the host out of the measured time.
    end = clock.record_mark()
    clock.synchronize()
    wall_s = time.perf_counter() - started
    seconds = clock.compute_seconds(begin, end)
    return gather_from_all((seconds if seconds > 0 else wall_s) / calls, group)


def _count_wrong_by_source(operation: Operation, buffers: Buffers, group: RankGroup) -> dict[int | None, int]:
    """Wrong elements that this rank received, by the global rank of their source."""
    n, received = group.size, buffers.receive
    share_elements = max(len(buffers.send), len(received)) // n
    expected = make_expected_values(operation, received.dtype, group.member, n, share_elements)
    if operation.by_share:
        parts = received.split(share_elements)
        return {group.ranks[i]: count_wrong(part, expected, i * share_elements) for i, part in enumerate(parts)}
    source = operation.source(group.member, n)
    return {None if source is None else group.ranks[source]: count_wrong(received, expected)}


def gather_wrong_elements(operation: Operation, buffers: Buffers, group: RankGroup) -> list[WrongElements]:
    """Wrong elements after the first call, of all ranks."""
    own = _count_wrong_by_source(operation, buffers, group)
    # One number per rank in the usual case; the details are pickled objects, which are slow to gather.
    if not any(gather_from_all(float(sum(own.values())), group)):
        return []
    every: list[dict[int | None, int] | None] = [None] * group.size
    dist.all_gather_object(every, own, group=group.handle)
    return [
        WrongElements(rank=rank, source=source, count=count)
        for rank, found in zip(group.ranks, every, strict=True)
        for source, count in (found or {}).items()
        if count
    ]


def _iterate_chunks(tensor: torch.Tensor) -> Iterator[tuple[int, torch.Tensor]]:
    """Element indices of `tensor` in parts, each with its first index."""
    for begin in range(0, len(tensor), CHUNK):
        yield begin, torch.arange(begin, min(begin + CHUNK, len(tensor)), device=tensor.device)
