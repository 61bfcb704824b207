"""Findings of many nodes and devices as few lines: what says the same of several of them is said once."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

from msgspec import Struct

from primus.machine.tree import build_sort_key
from primus.preflight.finding import CheckFinding, Status
from primus.preflight.node import format_ranges

WEIGHT: dict[Status, int] = {"fail": 0, "unknown": 1, "warn": 2, "info": 3, "ok": 3}
MOST_NAMES = 3
"""Of more subjects the first, the last and their number are shown."""

Row = tuple[str, CheckFinding]
"""A host and one of its findings."""
Key = tuple[object, ...]


class ReportLine(Struct, frozen=True, kw_only=True):
    """What one or more findings say in one row."""

    status: Status
    hosts: tuple[str, ...]
    check: str
    subjects: str
    measured: str
    expected: str
    reason: str
    advice: str


def group_lines(rows: Iterable[Row]) -> list[ReportLine]:
    """Rows as they are shown, the worst first; those that say the same of several nodes or subjects are one line.

    Figures that differ count as the same, and their spread is shown. Nodes whose findings need attention share a line
    only where these are of the same subjects, so that a line names no device of a node that has no such finding.
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
    said = finding.measured if finding.value is None else ""
    return (finding.check, finding.status, finding.expected, said, finding.reason, finding.advice)


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
    """What was measured; of several figures the smallest, the largest and the one in the middle."""
    if len({finding.measured for finding in findings}) == 1:
        return findings[0].measured
    ranked = sorted(findings, key=lambda finding: finding.value or 0.0)
    low, middle, high = ranked[0].measured, ranked[(len(ranked) - 1) // 2].measured, ranked[-1].measured
    return f"{low} .. {high}" + (f", median {middle}" if len(ranked) > 2 else "")


def _format_names(names: Iterable[str]) -> str:
    shown = sorted({name for name in names if name}, key=build_sort_key)
    return ", ".join(shown) if len(shown) <= MOST_NAMES else f"{shown[0]} .. {shown[-1]} ({len(shown)})"


def group_by_hosts(shown: Iterable[ReportLine]) -> Mapping[tuple[str, ...], list[ReportLine]]:
    """Lines by the nodes that they are of, so that each set of nodes is named once."""
    found: dict[tuple[str, ...], list[ReportLine]] = {}
    for line in shown:
        found.setdefault(tuple(sorted(line.hosts, key=build_sort_key)), []).append(line)
    return found


def fold_hosts(hosts: Iterable[str]) -> str:
    """Host names as Slurm lists them: ``n[01-04,07],login``."""
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
