"""Finds the rank that a timed out collective waited for, by the watchdog reports of all ranks.

torch's NCCL watchdog names the rank, the collective and the last work that the rank enqueued
(torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp). A rank that enqueued less than the others had not reached it. A rank
that reports nothing, while others do, was not in it at all. Ranks that report different works wait for each other: the
one with the lower number lags, or their calls differ.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from msgspec import Struct

SIGNATURE = "collective-timeout"
_GROUP = re.compile(r"\[PG (?:ID )?(\S+?)(?: PG GUID \S+)?(?: \(\S+\))? Rank (\d+)\]|\[(?:[^\s\[\]]+ )*Rank (\d+)\]")
_WORK = re.compile(r"WorkNCCL\((?:[^()]*\b)?SeqNum=(\d+), OpType=(\w+)(?:, NumelIn=(\d+))?")
_ENQUEUED = re.compile(r"last enqueued (?:NCCL )?work: (-?\d+)")


class CollectiveTimeout(Struct, frozen=True, kw_only=True):
    """The combined reports of all watchdogs."""

    missing: tuple[int, ...]
    """Ranks that the others waited for, if the reports tell them."""
    reason: str
    """In one sentence, without a full stop."""


class _WatchdogReport(Struct):
    """The report of one rank's watchdog."""

    sequence: int | None = None
    operation: str = ""
    num_elements: str = ""
    enqueued: dict[str, int] = {}
    """Last enqueued work of each process group."""


def find_missing_ranks(
    reports: Iterable[tuple[int | None, str]], known: Iterable[int], world_size: int
) -> CollectiveTimeout | None:
    """What the reports tell of a collective that timed out; None if they name no rank.

    Args:
        reports: Rank and text of each line of a watchdog.
        known: Ranks that have a log or a heartbeat.
        world_size: Ranks of the job; 0 if unknown.
    """
    by_rank: dict[int, _WatchdogReport] = {}
    for rank, text in reports:
        _read_watchdog_line(by_rank, rank, text)
    if not by_rank:
        return None
    everyone = {*known, *range(max(world_size, max(by_rank) + 1))}
    return (
        _find_lagging_ranks(by_rank)
        or _find_other_works(by_rank)
        or _find_silent_ranks(by_rank, everyone)
        or CollectiveTimeout(
            missing=(),
            reason=f"{_describe_operation(by_rank)} timed out: {_format_ranks(tuple(sorted(by_rank)))} waited in it",
        )
    )


def _read_watchdog_line(by_rank: dict[int, _WatchdogReport], rank: int | None, text: str) -> None:
    head = _GROUP.search(text)
    named = next((group for group in head.groups()[1:] if group), None) if head else None
    if rank is None:
        rank = int(named) if named else None
    if rank is None:
        return
    report = by_rank.setdefault(rank, _WatchdogReport())
    if work := _WORK.search(text):
        report.sequence, report.operation, report.num_elements = int(work[1]), work[2], work[3] or ""
    if (enqueued := _ENQUEUED.search(text)) and head and head[1]:
        report.enqueued[head[1]] = max(int(enqueued[1]), report.enqueued.get(head[1], -1))


def _find_lagging_ranks(by_rank: dict[int, _WatchdogReport]) -> CollectiveTimeout | None:
    """Ranks that enqueued less than most others in the same process group."""
    groups = {group for report in by_rank.values() for group in report.enqueued}
    for group in sorted(groups):
        enqueued = {rank: report.enqueued[group] for rank, report in by_rank.items() if group in report.enqueued}
        newest = max(enqueued.values())
        behind = tuple(sorted(rank for rank, number in enqueued.items() if number < newest))
        if behind and 2 * len(behind) < len(enqueued):
            numbers = sorted({enqueued[rank] for rank in behind})
            last = numbers[0] if len(numbers) == 1 else f"{numbers[0]} to {numbers[-1]}"
            reason = (
                f"{_describe_operation(by_rank)} timed out: {_format_ranks(behind)} had enqueued {last}, "
                f"the others up to {newest}"
            )
            return CollectiveTimeout(missing=behind, reason=reason)
    return None


def _find_other_works(by_rank: dict[int, _WatchdogReport]) -> CollectiveTimeout | None:
    """The ranks whose work is older than that of the others, or another operation, within one process group."""
    works = {rank: report for rank, report in sorted(by_rank.items()) if report.sequence is not None}
    newest = max((report.sequence or 0 for report in works.values()), default=0)
    behind = tuple(rank for rank, report in works.items() if report.sequence != newest)
    first = behind[0] if behind else min(works, default=-1)
    others = (rank for rank in works if rank not in behind and works[rank].operation != works[first].operation)
    ahead = next((rank for rank in works if rank not in behind), -1) if behind else next(others, -1)
    if ahead < 0 or len({group for report in by_rank.values() for group in report.enqueued}) > 1:
        return None
    why = f"{'it lags' if len(behind) == 1 else 'they lag'}, or " if behind else ""
    reason = (
        f"a collective timed out: {_format_ranks(behind or (first,))} waited in {_describe_work(works[first])}, "
        f"rank {ahead} in {_describe_work(works[ahead])}: {why}the ranks call different collectives"
    )
    return CollectiveTimeout(missing=behind, reason=reason)


def _find_silent_ranks(by_rank: dict[int, _WatchdogReport], ranks: set[int]) -> CollectiveTimeout | None:
    """Ranks without a watchdog report, if they are the minority."""
    silent = tuple(sorted(ranks - set(by_rank)))
    if not silent or len(silent) >= len(by_rank):
        return None
    reason = (
        f"{_describe_operation(by_rank)} timed out: {_format_ranks(silent)} did not report it, "
        f"{len(by_rank)} others did"
    )
    return CollectiveTimeout(missing=silent, reason=reason)


def _describe_operation(by_rank: dict[int, _WatchdogReport]) -> str:
    first = next((report for _, report in sorted(by_rank.items()) if report.sequence is not None), None)
    return f"collective {_describe_work(first)}" if first else "a collective"


def _describe_work(report: _WatchdogReport) -> str:
    elements = f", {report.num_elements} elements" if report.num_elements else ""
    return f"{report.sequence} ({report.operation}{elements})"


def _format_ranks(ranks: tuple[int, ...]) -> str:
    shown = ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")
    return f"rank {shown}" if len(ranks) == 1 else f"ranks {shown}"
