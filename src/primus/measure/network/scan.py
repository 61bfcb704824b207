"""Bandwidth between every two processes of a group, many pairs concurrently."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

import torch

from primus.machine.measurements import Pair
from primus.measure.network import collectives
from primus.measure.network.collectives import Buffers, RankGroup
from primus.measure.timing import create_clock

WARM_UP_CALLS = 2
CALLS = 10

Exchange = Callable[[Buffers, RankGroup, int], None]
"""Sends to a member of the group and receives from it concurrently."""


def exchange_with_partner(buffers: Buffers, group: RankGroup, partner: int) -> None:
    """One message each way."""
    collectives.exchange_messages(buffers, group, partner, partner)


def run_round(
    number: int,
    meeting: Sequence[tuple[int, int]],
    group: RankGroup,
    size_bytes: int,
    *,
    between_nodes: bool,
    exchange: Exchange = exchange_with_partner,
) -> list[Pair]:
    """Measure the pairs of one round; every member of `group` gets the same result, also a member without a pair.

    Args:
        number: Index of the round, from 0.
        meeting: Pairs of members of the group, without common members.
        group: All processes of the scan.
        size_bytes: Size of each message.
        between_nodes: Whether the members are on different nodes.
        exchange: The exchange to measure.
    """
    partners = dict(meeting) | {second: first for first, second in meeting}
    # All pairs of a round start together, so that they share switches and links as in a real job.
    collectives.barrier(group)
    seconds, wrong = _measure_exchange(partners.get(group.member), group, size_bytes, exchange)
    times_s, wrongs = collectives.gather_from_all(seconds, group), collectives.gather_from_all(float(wrong), group)
    return [
        Pair(
            first=group.ranks[first],
            second=group.ranks[second],
            round=number,
            between_nodes=between_nodes,
            size_bytes=size_bytes,
            gb_per_s=collectives.compute_algorithm_bandwidth(size_bytes, max(times_s[first], times_s[second])),
            wrong=int(wrongs[first] + wrongs[second]),
        )
        for first, second in meeting
    ]


def _measure_exchange(partner: int | None, group: RankGroup, size_bytes: int, exchange: Exchange) -> tuple[float, int]:
    """Seconds of one exchange with `partner`, and the number of wrong elements in the first one."""
    # No early exit for the group: this member still takes part in the gather calls of run_round.
    if partner is None:
        return 0.0, 0
    index = torch.arange(size_bytes // collectives.DTYPE.itemsize, device=group.device)
    send = collectives.encode_element(group.member, partner, index).to(collectives.DTYPE)
    buffers = Buffers(send, torch.full_like(send, -1.0))
    exchange(buffers, group, partner)  # also creates the connection, which takes longer than many messages
    wrong = collectives.count_wrong(buffers.receive, lambda i: collectives.encode_element(partner, group.member, i))
    for _ in range(WARM_UP_CALLS):
        exchange(buffers, group, partner)
    return _measure_seconds(lambda: exchange(buffers, group, partner), group), wrong


def _measure_seconds(call: Callable[[], object], group: RankGroup) -> float:
    """Median time of a call, which ignores calls that the operating system interrupts."""
    clock = create_clock(group.device)
    clock.synchronize()
    marks = []
    # No wait between calls: the queue stays full, and each pair of marks contains one exchange only.
    for _ in range(CALLS):
        begin = clock.record_mark()
        call()
        marks.append((begin, clock.record_mark()))
    clock.synchronize()
    return max(statistics.median([clock.compute_seconds(begin, end) for begin, end in marks]), 1e-9)
