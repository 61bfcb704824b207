"""Summarize the findings of many nodes and devices: equal findings share one line."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

from msgspec import Struct

from primus.machine.tree import build_sort_key
from primus.preflight.findings.finding import CheckFinding, Status
from primus.preflight.findings.node import format_ranges

WEIGHT: dict[Status, int] = {"fail": 0, "unknown": 1, "warn": 2, "info": 3, "ok": 3}
MOST_NAMES = 3
"""For more subjects the line contains the first, the last and the count."""

Row = tuple[str, CheckFinding]
"""A host and one of its findings."""
Key = tuple[object, ...]


class ReportLine(Struct, frozen=True, kw_only=True):
    """A row that represents one or more findings."""

    status: Status
    hosts: tuple[str, ...]
    check: str
    subjects: str
    measured: str
    expected: str
    reason: str
    advice: str


def group_lines(rows: Iterable[Row]) -> list[ReportLine]:
    """Rows in the order of severity, the worst first; equal findings of several nodes or subjects share one row.

    Findings that differ only in their figures are equal, and the row contains the range. Nodes whose findings need
    attention share a row only if the subjects are the same, so that every device in a row has the finding.
    """
    bundles: dict[Key, list[Row]] = {}
    for host, finding in rows:
        bundles.setdefault((_build_key(finding), "" if _is_calm(finding) else host), []).append((host, finding))
    merged: dict[Key, list[Row]] = {}
    for (key, _), bundle in bundles.items():
        subjects = () if _is_calm(bundle[0][1]) else tuple(sorted({finding.subject for _, finding in bundle}))
        merged.setdefault((key, subjects), []).extend(bundle)
    return sorted(map(_build_line, merged.values()), key=lambda line: WEIGHT[line.status])


def _is_calm(finding: CheckFinding) -> bool:
    return finding.status in ("ok", "info")


def _build_key(finding: CheckFinding) -> Key:
    measured = finding.measured if finding.value is None else ""
    return (finding.check, finding.status, finding.expected, measured, finding.reason, finding.advice)


def _build_line(bundle: Sequence[Row]) -> ReportLine:
    finding = bundle[0][1]
    return ReportLine(
        status=finding.status,
        hosts=tuple(dict.fromkeys(host for host, _ in bundle)),
        check=finding.check,
        subjects=_format_names(finding.subject for _, finding in bundle),
        measured=_format_spread([finding for _, finding in bundle]),
        expected=finding.expected,
        reason=finding.reason,
        advice=finding.advice if not _is_calm(finding) else "",
    )


def _format_spread(findings: Sequence[CheckFinding]) -> str:
    """The measured value; for several figures the minimum, the maximum and the median."""
    if len({finding.measured for finding in findings}) == 1:
        return findings[0].measured
    ranked = sorted(findings, key=lambda finding: finding.value or 0.0)
    low, middle, high = ranked[0].measured, ranked[(len(ranked) - 1) // 2].measured, ranked[-1].measured
    return f"{low} .. {high}" + (f", median {middle}" if len(ranked) > 2 else "")


def _format_names(names: Iterable[str]) -> str:
    shown = sorted({name for name in names if name}, key=build_sort_key)
    return ", ".join(shown) if len(shown) <= MOST_NAMES else f"{shown[0]} .. {shown[-1]} ({len(shown)})"


def group_by_hosts(shown: Iterable[ReportLine]) -> Mapping[tuple[str, ...], list[ReportLine]]:
    """Rows grouped by their set of nodes, so that each set is printed once."""
    found: dict[tuple[str, ...], list[ReportLine]] = {}
    for line in shown:
        found.setdefault(tuple(sorted(line.hosts, key=build_sort_key)), []).append(line)
    return found


def fold_hosts(hosts: Iterable[str]) -> str:
    """Host names as a Slurm host list: ``n[01-04,07],login``."""
    groups: dict[tuple[str, int, str], list[int]] = {}
    plain: dict[str, None] = {}
    for host in sorted(set(hosts), key=build_sort_key):
        match = re.fullmatch(r"(.*?)(\d+)(\D*)", host)
        if match:
            groups.setdefault((match[1], len(match[2]), match[3]), []).append(int(match[2]))
        else:
            plain[host] = None
    folded = [_fold_numbers(numbers, *parts) for parts, numbers in groups.items()]
    return ",".join([*folded, *plain])


def _fold_numbers(numbers: Sequence[int], prefix: str, width: int, suffix: str) -> str:
    shown = re.sub(r"\d+", lambda number: number[0].zfill(width), format_ranges(numbers).replace(" ", ""))
    return f"{prefix}{shown if len(numbers) == 1 else f'[{shown}]'}{suffix}"
