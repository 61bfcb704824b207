"""Find slow RDMA ports: a tournament of all nodes on all rails concurrently, then bisection of the suspects.

A member is a port of a node. In a round of the tournament each node is paired with another one. All rails of all pairs
transfer concurrently, first in one direction, then in the other. A slow port is slow with each partner. Members that
explain the slow pairs are measured again with known-good partners: alone, and together, since some ports are slow only
if they share a path.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from msgspec import Struct

from primus.machine.measurements import list_pair_rounds
from primus.preflight.findings.finding import CheckFinding
from primus.preflight.findings.node import format_names
from primus.preflight.findings.rules import About, judge, report_info
from primus.preflight.performance import fault_localization
from primus.preflight.rdma.perftest import PROGRAM, Rail, TransferReading
from primus.report import table

CHECK = "performance.rdma_bandwidth"
FLOOR_SHARE = 0.7
"""Minimum share of a port's rate: 280 of 400 Gb/s at 8 MiB (ROCm/cvs, ib_write_bw)."""
BELOW_OTHERS = 0.1
"""Relative distance below the usual rate of the other ports at which a port is reported."""
MOST_ROUNDS = 7
"""Maximum number of rounds of a tournament, and so of partners of each node, which limits its duration."""


class Member(NamedTuple):
    """A port of a node."""

    node: int
    rail: int


class Transfer(NamedTuple):
    """A transfer from one member to another one of the same rail."""

    sender: Member
    receiver: Member


class RdmaInventory(Struct, frozen=True, kw_only=True):
    """RDMA ports of a node."""

    address: str = ""
    rails: tuple[Rail, ...] = ()
    problem: str = ""
    """Reason why the node cannot take part; empty if it can."""


Transfers = Callable[[Sequence[Transfer]], Mapping[Transfer, TransferReading]]
"""Runs transfers concurrently."""


class TournamentResult(NamedTuple):
    """Result of a tournament and of the following bisection."""

    readings: dict[Transfer, list[TransferReading]]
    guilty: list[tuple[Member, ...]]
    """Groups of members that are slow: single members, or several that are slow only together."""
    doubtful: list[Member]
    """Members of slow pairs that have no known-good partner on their rail."""
    cleared: list[Member]
    """Members that were slow in the tournament and reach the required share with known-good partners."""


class Tournament:
    """Measures the transfers and finds the slow members.

    Args:
        inventories: Inventories of the participating nodes, by node rank.
        transfer: Runs transfers.
        say: Receives progress messages.
    """

    def __init__(
        self, inventories: Mapping[int, RdmaInventory], transfer: Transfers, say: Callable[[str], None] = lambda _: None
    ) -> None:
        self._nodes = sorted(inventories)
        self._rails = {Member(node, rail.index): rail for node, one in inventories.items() for rail in one.rails}
        self._transfer, self._say = transfer, say
        self._readings: dict[Transfer, list[TransferReading]] = defaultdict(list)

    def run_tournament(self) -> TournamentResult:
        """Run all rounds, then bisect the suspects."""
        # The circle method pairs every two nodes exactly once. Rounds are independent, so a prefix of them is a fair
        # sample. A single node transfers from each port to itself.
        meetings = list_pair_rounds(len(self._nodes))[:MOST_ROUNDS] if len(self._nodes) > 1 else [[(0, 0)]]
        for number, meeting in enumerate(meetings):
            self._say(f"RDMA bandwidth: round {number + 1} of {len(meetings)}")
            ahead = [self._list_transfers(self._nodes[a], self._nodes[b]) for a, b in meeting]
            # The reverse direction runs afterwards: the floor is that of transfers in one direction (without
            # --bidirectional).
            back = [self._list_transfers(self._nodes[b], self._nodes[a]) for a, b in meeting if a != b]
            self._measure_shares([transfer for some in ahead for transfer in some])
            self._measure_shares([transfer for some in back for transfer in some])
        return self._judge_rounds()

    def _list_transfers(self, sender: int, receiver: int) -> list[Transfer]:
        """Transfers on every rail that both nodes have."""
        own = [member for member in self._rails if member.node == sender]
        return [Transfer(m, Member(receiver, m.rail)) for m in own if Member(receiver, m.rail) in self._rails]

    def _measure_shares(self, transfers: Sequence[Transfer]) -> list[float]:
        """Share of the port rate that each transfer reached; 0 if it failed."""
        if not transfers:
            return []
        found = self._transfer(transfers)
        # A transfer without a reading counts as 0: a node that stopped responding must be a suspect, not be ignored.
        lost = TransferReading(problem="no response from the node")
        for transfer in transfers:
            self._readings[transfer].append(found.get(transfer, lost))
        return [self._compute_share(transfer, found.get(transfer, lost)) for transfer in transfers]

    def _compute_share(self, transfer: Transfer, reading: TransferReading) -> float:
        """Share of the lower rate of both ports; for a port without a known rate, the bandwidth in Gb/s."""
        rates = [self._rails[member].rate_gbps for member in transfer]
        return (reading.gbps or 0.0) / min((rate for rate in rates if rate), default=1.0)

    def _judge_rounds(self) -> TournamentResult:
        shares = self._compute_pair_shares()
        least = self._compute_required_share(list(shares.values()))
        bad = [pair for pair, share in shares.items() if share < least]
        if len(self._nodes) == 1:
            return TournamentResult(dict(self._readings), [(member,) for member, _ in bad], [], [])
        suspects = self._find_suspects(shares, bad)
        references = [member for member in self._rails if member not in suspects]
        return self._bisect_suspects(suspects, references, least)

    def _compute_pair_shares(self) -> dict[tuple[Member, Member], float]:
        """Share of the slower direction of each pair."""
        found: dict[tuple[Member, Member], float] = {}
        for transfer, readings in self._readings.items():
            pair = (min(transfer), max(transfer))
            share = min(self._compute_share(transfer, reading) for reading in readings)
            found[pair] = min(found.get(pair, share), share)
        return found

    def _compute_required_share(self, shares: Sequence[float]) -> float:
        """Minimum share of a transfer; if a rate is unknown, only the comparison with the other transfers counts."""
        # The upper quartile: up to three quarters of the pairs may contain a slow port without lowering the usual
        # value.
        usual = sorted(shares, reverse=True)[len(shares) // 4] if shares else 0.0
        knows_rates = all(rail.rate_gbps for rail in self._rails.values())
        return max(FLOOR_SHARE if knows_rates else 1e-9, usual * (1 - BELOW_OTHERS))

    def _find_suspects(
        self, shares: Mapping[tuple[Member, Member], float], bad: Sequence[tuple[Member, Member]]
    ) -> list[Member]:
        """Members that explain the bad pairs of each rail, and both members of unexplained pairs."""
        found: set[Hashable] = set()
        for rail in {first.rail for first, _ in bad}:
            own = [
                fault_localization.PairResult(*pair, share) for pair, share in shares.items() if pair[0].rail == rail
            ]
            own_bad = [fault_localization.PairResult(*pair, None) for pair in bad if pair[0].rail == rail]
            blamed = {*fault_localization.find_culprits(own, own_bad)}
            unexplained = [result for result in own_bad if not {result.first, result.second} & blamed]
            found |= blamed | {member for result in unexplained for member in (result.first, result.second)}
        return [member for member in self._rails if member in found]

    def _bisect_suspects(self, suspects: list[Member], references: Sequence[Member], least: float) -> TournamentResult:
        """Bisect the suspects with known-good partners on their rails, until the remaining ones work together."""
        partners = {rail: [m for m in references if m.rail == rail] for rail in {m.rail for m in self._rails}}
        doubtful = [member for member in suspects if not partners[member.rail]]
        left = [member for member in suspects if partners[member.rail]]
        guilty: list[tuple[Member, ...]] = []
        # Each pass removes one minimal failing group, so the loop ends after at most one pass per suspect.
        while left:
            self._say(f"RDMA bandwidth: bisecting {len(left)} ports")
            found = fault_localization.bisect_group(left, lambda some: self._reaches_share(some, partners, least))
            if not found:
                break
            guilty.append(tuple(found))
            left = [member for member in left if member not in found]
        return TournamentResult(dict(self._readings), guilty, doubtful, left)

    def _reaches_share(self, some: Sequence[Member], partners: Mapping[int, Sequence[Member]], least: float) -> bool:
        """Whether all members reach the required share concurrently, each with a separate partner if there are
        enough."""
        batches: dict[int, list[Transfer]] = defaultdict(list)
        turns: dict[int, int] = defaultdict(int)
        # The partners of a rail are reused batch after batch: two suspects on one partner would halve each other's
        # rate.
        for member in some:
            batch, place = divmod(turns[member.rail], len(partners[member.rail]))
            turns[member.rail] += 1
            batches[batch].append(Transfer(member, partners[member.rail][place]))
        shares = [
            share
            for batch in batches.values()
            for share in (*self._measure_shares(batch), *self._measure_shares([Transfer(b, a) for a, b in batch]))
        ]
        return all(share >= least for share in shares)


def report_tournament(
    outcome: TournamentResult,
    inventories: Mapping[int, RdmaInventory],
    hosts: Mapping[int, str],
    lost: Sequence[int] = (),
) -> Iterator[CheckFinding]:
    """Findings of the tournament for each node, which `host` names."""
    rails = {Member(node, rail.index): rail for node, one in inventories.items() for rail in one.rails}
    readings = outcome.readings
    bad = {member for group in outcome.guilty for member in group} | {*outcome.doubtful}
    for group in outcome.guilty:
        for member in group:
            yield _report_slow_ports(member, group, rails, readings, hosts)
    for row, members in (("doubtful", outcome.doubtful), ("cleared", outcome.cleared)):
        for member in members:
            about = About(_format_subject(member, rails), hosts.get(member.node, ""))
            reached, wanted = _format_reached_rate(member, readings), _format_expected_rate(rails[member])
            yield judge(f"{CHECK}/{row}", False, reached, about, wanted=wanted)
    for node in lost:
        yield judge(f"{CHECK}/lost", False, "", About(host=hosts.get(node, "")))
    for node, one in inventories.items():
        own = [member for member in rails if member.node == node and member not in bad]
        if own and node not in lost:
            yield _report_healthy_ports(own, one, readings, hosts.get(node, ""))


def _report_slow_ports(
    member: Member,
    group: Sequence[Member],
    rails: Mapping[Member, Rail],
    readings: Mapping[Transfer, Sequence[TransferReading]],
    hosts: Mapping[int, str],
) -> CheckFinding:
    others = [f"{rails[other].name} of {hosts.get(other.node, other.node)}" for other in group if other != member]
    together = f", only while {format_names(others)} send as well" if others else ""
    problems = {one.problem for pair, some in readings.items() if member in pair for one in some if one.problem}
    failed = f": {format_names(sorted(problems), 1)}" if problems else ""
    row = f"{CHECK}/shared" if others else CHECK
    if len(readings) == 1:
        row = f"{CHECK}/shared_alone" if others else f"{CHECK}/alone"
    words = {"wanted": _format_expected_rate(rails[member]), "value": _find_least_value(member, readings)}
    about = About(_format_subject(member, rails), hosts.get(member.node, ""))
    return judge(row, False, f"{_format_reached_rate(member, readings)}{together}{failed}", about, **words)


def _report_healthy_ports(
    members: Sequence[Member], one: RdmaInventory, readings: Mapping[Transfer, Sequence[TransferReading]], host: str
) -> CheckFinding:
    values = [max(_list_values(member, readings), default=0.0) for member in members]
    lowest = min((rail.rate_gbps for rail in one.rails if rail.rate_gbps), default=None)
    expected = f">= {FLOOR_SHARE * lowest:g} Gb/s" if lowest else "as the other ports"
    shown = f"{len(members)} ports, {table.format_number(min(values))} - {table.format_number(max(values))} Gb/s"
    return judge(f"{CHECK}/healthy", True, shown, About(host=host), wanted=expected, value=min(values))


def _format_subject(member: Member, rails: Mapping[Member, Rail]) -> str:
    return f"{rails[member].name} (rail {member.rail})"


def _format_expected_rate(rail: Rail) -> str:
    return f">= {FLOOR_SHARE * rail.rate_gbps:g} Gb/s" if rail.rate_gbps else "as the other ports"


def _list_values(member: Member, readings: Mapping[Transfer, Sequence[TransferReading]]) -> list[float]:
    return [one.gbps or 0.0 for pair, some in readings.items() if member in pair for one in some]


def _find_least_value(member: Member, readings: Mapping[Transfer, Sequence[TransferReading]]) -> float:
    return min(_list_values(member, readings), default=0.0)


def _format_reached_rate(member: Member, readings: Mapping[Transfer, Sequence[TransferReading]]) -> str:
    values = _list_values(member, readings)
    if not values or max(values) == 0.0:
        return "no transfer worked"
    return f"{table.format_number(min(values))} - {table.format_number(max(values))} Gb/s"


def report_absent_nodes(inventories: Mapping[int, RdmaInventory], hosts: Mapping[int, str]) -> Iterator[CheckFinding]:
    """Nodes that cannot take part, with the reason."""
    reasons: dict[str, list[str]] = defaultdict(list)
    for node, one in inventories.items():
        if one.problem:
            reasons[one.problem].append(hosts.get(node, str(node)))
    for problem, names in reasons.items():
        yield report_info(
            CHECK, f"not measured on {format_names(names)}: {problem}", f"{PROGRAM} of perftest measures each port"
        )


def report_uneven_nodes(inventories: Mapping[int, RdmaInventory], hosts: Mapping[int, str]) -> Iterable[CheckFinding]:
    """Nodes with fewer ports than others; their missing rails have no partner."""
    most = max((len(one.rails) for one in inventories.values()), default=0)
    for node, one in inventories.items():
        if 0 < len(one.rails) < most:
            yield judge(f"{CHECK}/uneven", False, str(len(one.rails)), About(host=hosts.get(node, "")), most=most)
