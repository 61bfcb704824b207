"""Where nodes stand, as the bandwidths that `preflight --perf` measured between them show."""

from __future__ import annotations

import contextlib
import itertools
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path

import msgspec
from msgspec import Struct

from primus.machine.measurements import FILE, Pair
from primus.machine.placement.rank_order import Place

LEAST_STEP = 1.3
"""Quotient of two neighboring bandwidths from which they belong to different levels: a spine with half of the uplinks
halves the bandwidth, while pairs of one level differ by some percent in a scan."""
MOST_RUNS = 20
"""Newest preflights that are looked at."""

HostPair = tuple[str, str]


class _MeasuredRank(Struct, frozen=True):
    """What is read of `measurements.RankResult`."""

    rank: int
    host: str


class _MeasuredPairs(Struct, frozen=True):
    """What is read of `measurements.MeasurementResults`."""

    backend: str = ""
    ranks: tuple[_MeasuredRank, ...] = ()
    pairs: tuple[Pair, ...] = ()


def find_measured_places(workspace: Path, hosts: Collection[str]) -> tuple[dict[str, Place], Path] | None:
    """Places of `hosts` by the newest preflight in `workspace` that measured all of them, and its file.

    None without such a preflight, or if its bandwidths show no groups.
    """
    for file in sorted(workspace.glob(f"preflight/[0-9]*/{FILE}"), reverse=True)[:MOST_RUNS]:
        with contextlib.suppress(OSError, msgspec.MsgspecError):
            places = read_measured_places(file)
            if places and set(hosts) <= set(places):
                return places, file
    return None


def read_measured_places(file: Path) -> dict[str, Place]:
    """Places by the pairs of nodes in the results of a preflight; empty if they show no groups.

    Pairs of CPU processes (gloo) are not used: on loopback or a busy host their bandwidths are noise.

    Raises:
        msgspec.MsgspecError: The file holds something else.
        OSError: The file cannot be read.
    """
    results = msgspec.json.decode(file.read_bytes(), type=_MeasuredPairs)
    if results.backend == "gloo":
        return {}
    hosts = {each.rank: each.host for each in results.ranks}
    found: dict[HostPair, float] = {}
    for pair in results.pairs:
        first, second = hosts.get(pair.first), hosts.get(pair.second)
        if pair.between_nodes and pair.gb_per_s and first is not None and second is not None:
            found[first, second] = pair.gb_per_s
    return cluster_nodes(found)


def cluster_nodes(bandwidths: Mapping[HostPair, float]) -> dict[str, Place]:
    """Places of nodes by the bandwidth of each pair; empty where bandwidths do not form groups.

    Each step between the sorted bandwidths is a level: nodes that are connected by faster pairs stand below one switch.
    A level counts only if all pairs of each of its groups are fast and two groups have several nodes; otherwise the
    step is a slow node or a slow link, which preflight reports.
    """
    rates = sorted(set(bandwidths.values()))
    hosts = sorted({host for pair in bandwidths for host in pair})
    if len(bandwidths) < len(hosts) * (len(hosts) - 1) // 2:
        return {}
    levels = []
    for slower, faster in itertools.pairwise(rates):
        if faster >= slower * LEAST_STEP:
            groups = _connect_nodes(hosts, (pair for pair, rate in bandwidths.items() if rate >= faster))
            if _are_switches(groups, bandwidths, faster):
                levels.append(groups)
    if not levels:
        return {}
    # Names as of switches: by the first node below them.
    return {host: tuple(f"near-{groups[host]}" for groups in levels) for host in hosts}


def _connect_nodes(hosts: Iterable[str], pairs: Iterable[HostPair]) -> dict[str, str]:
    """First node of the group of each node, where `pairs` connect nodes to groups."""
    members = {host: [host] for host in hosts}
    for first, second in pairs:
        if members[first] is not members[second]:
            larger, smaller = sorted((members[first], members[second]), key=len, reverse=True)
            larger += smaller
            members.update(dict.fromkeys(smaller, larger))
    return {host: min(group) for host, group in members.items()}


def _are_switches(groups: Mapping[str, str], bandwidths: Mapping[HostPair, float], least: float) -> bool:
    sizes = Counter(groups.values()).values()
    within = [rate for (first, second), rate in bandwidths.items() if groups[first] == groups[second]]
    return sum(size > 1 for size in sizes) > 1 and min(within) >= least
