"""Ranks the causes that the logs of an attempt show: the likeliest first."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence

from msgspec import structs

from primus.diagnosis import collective_timeout, log_line
from primus.diagnosis.collective_timeout import CollectiveTimeout
from primus.diagnosis.finding import Cause, Diagnosis, Evidence
from primus.diagnosis.logs import count_lines_before
from primus.diagnosis.run_evidence import RunEvidence
from primus.diagnosis.scan import LogScan, RootCauseBlock, SignatureHit
from primus.diagnosis.signature import Signature, compile_regex
from primus.runs.store import Action

NUM_EVIDENCE = 3
"""Lines kept as evidence of each cause."""
NUM_NOTES = 2
BLOCK_LINES = 10
ERROR_SUFFIX = ".error.json"
NUM_FACT_HITS = 200
"""Lines of a signature from which facts are told."""
MOST_FACTS = 8
"""Values told of one fact."""
REASON_DISTANCE = 60
"""Lines between an operation and the error of the system that made it fail."""
INTERRUPT = "interrupted-by-user"
INTERRUPT_LINES = 200
"""Lines that the processes of an interrupted program may still write."""
_ROLES = {"root": 0, "symptom": 1, "cascade": 2, "info": 3}
_STRENGTHS = {"certain": -1.0, "definite": 0.0, "likely": 1.0, "weak": 2.0}
_DOUBTFUL = 0.5
"""Added to the rank of a root that a step or two followed."""
_UNPROVEN = 1.5
"""Added to the rank of a root that is likely, without a line that shows the end of a process."""


def rank_causes(scans: Sequence[LogScan], evidence: RunEvidence, seen_before: Callable[[str], bool]) -> Diagnosis:
    """The causes, the likeliest first, and the rank that failed first.

    Args:
        scans: What the logs show.
        evidence: What the run folder records besides its logs.
        seen_before: Whether the previous attempt ended with the same signature.
    """
    blocks = sorted((block for scan in scans for block in scan.blocks), key=lambda block: block.time or math.inf)
    hits = [_locate_hit(hit, blocks, evidence) for scan in scans for hit in scan.hits] + list(evidence.hits)
    victims = _find_victim_ranks(hits)
    failures = sorted(evidence.failures, key=lambda failure: failure.rank in victims)
    evidence = structs.replace(evidence, failures=tuple(failures))
    first_rank, first_host = _find_first_failure(evidence, blocks)
    kept = _mark_warnings(_mark_survived_hits(_drop_other_attempts(hits), scans))
    if not evidence.failures and not blocks and not any(scan.ends_in_traceback for scan in scans):
        kept = _mark_unproven_hits(kept, scans)
    groups: dict[tuple[str, str], list[SignatureHit]] = {}
    for hit in _mark_consequences(kept):
        groups.setdefault((hit.signature.name, hit.signature.role), []).append(hit)
    enough = [_select_fatal_hits(group) for group in groups.values() if len(group) >= group[0].signature.count]
    ordered = _put_reason_first(sorted(enough, key=lambda group: _get_likelihood_order(group, first_rank)))
    causes = tuple(_build_cause(group, evidence, seen_before) for group in ordered)
    notes = _shorten_notes([scan.note for scan in scans if scan.note])
    diagnosis = Diagnosis(causes=causes, first_rank=first_rank, first_host=first_host, notes=notes, num_logs=len(scans))
    cause = diagnosis.cause
    if cause is None:
        timeout = _find_collective_timeout(scans, kept, evidence)
        return structs.replace(diagnosis, **_answer_with_effects(causes, evidence, victims, timeout))
    rank, host, local_rank = _find_group_place(ordered[0], evidence, first_rank)
    if rank is not None and host is None:
        host = next((hit.host for hit in kept if hit.rank == rank and hit.host), None)
    # A node must not be excluded because it reports another one, which schedulers know by name and lines by address.
    is_blamed = any(hit.signature.find_blamed_host(hit.text) for hit in ordered[0])
    if rank is None and host is None:
        rank, host = first_rank, first_host
    return structs.replace(
        diagnosis,
        first_rank=rank,
        first_host=host,
        first_local_rank=local_rank,
        action="retry" if cause.action == "exclude" and is_blamed else cause.action,
        reason=cause.summary + format_place(rank, host, local_rank),
    )


def _select_fatal_hits(group: Sequence[SignatureHit]) -> list[SignatureHit]:
    """Hits that training did not survive, or all if it survived each; by time."""
    return sorted([hit for hit in group if not hit.survived] or group, key=_get_time_order)


def _find_collective_timeout(
    scans: Sequence[LogScan], hits: Sequence[SignatureHit], evidence: RunEvidence
) -> CollectiveTimeout | None:
    """The ranks that the collective which timed out waited for, if the watchdogs' lines show them."""
    lines = [
        (hit.rank, hit.text) for hit in hits if hit.signature.name == collective_timeout.SIGNATURE and not hit.survived
    ]
    known = {scan.log.rank for scan in scans if scan.log.rank is not None} | set(evidence.heartbeats)
    world_size = max((scan.world_size for scan in scans), default=0)
    return collective_timeout.find_missing_ranks(lines, known, world_size)


def _shorten_notes(notes: Sequence[str]) -> tuple[str, ...]:
    """`notes`, or the first ones and the number of the others."""
    if len(notes) <= NUM_NOTES + 1:
        return tuple(notes)
    return (*notes[:NUM_NOTES], f"{len(notes) - NUM_NOTES} more logs were read in part")


def _find_victim_ranks(hits: Sequence[SignatureHit]) -> set[int | None]:
    """Ranks whose own reports show only consequences of another rank's failure."""
    shown: dict[int | None, set[str]] = {}
    for hit in hits:
        if hit.log.name.endswith(ERROR_SUFFIX):
            shown.setdefault(hit.rank, set()).add(hit.signature.role)
    return {rank for rank, roles in shown.items() if roles == {"cascade"}}


def _drop_other_attempts(hits: Iterable[SignatureHit]) -> list[SignatureHit]:
    """`hits` without those that other attempts wrote into the same log."""
    return [
        hit
        for hit in hits
        if hit.log.since is None or not hit.is_own_time or hit.time is None or hit.time >= hit.log.since
    ]


def _mark_survived_hits(hits: Sequence[SignatureHit], scans: Sequence[LogScan]) -> list[SignatureHit]:
    """`hits`, where what training survived on one rank counts as survived on all that do not report it as a failure.

    Often only one rank prints its steps, while all print the same warnings. A log with steps speaks for itself, and
    what follows the last step of all may be fatal though it was not before.
    """
    harmless = {_get_hit_shape(hit) for hit in hits if hit.survived}
    fatal = {(hit.rank, hit.signature.name) for hit in hits if hit.log.name.endswith(ERROR_SUFFIX)}
    with_steps = {scan.log.name for scan in scans if scan.has_steps}
    last_step = max((scan.last_step for scan in scans if scan.last_step is not None), default=math.inf)
    return [
        structs.replace(hit, survived=True)
        if hit.rank is not None
        and hit.log.name not in with_steps
        and (hit.time is None or hit.time <= last_step)
        and (hit.rank, hit.signature.name) not in fatal
        and _get_hit_shape(hit) in harmless
        else hit
        for hit in hits
    ]


def _mark_warnings(hits: Sequence[SignatureHit]) -> list[SignatureHit]:
    """`hits`, where a warning counts as survived if another line shows the cause and that a process ended with it."""
    is_shown = any(
        (_is_root(hit) or hit.signature.name == INTERRUPT) and hit.is_end and not hit.is_warning and not hit.survived
        for hit in hits
    )
    return [
        structs.replace(hit, survived=True) if is_shown and _is_root(hit) and hit.is_warning and not hit.is_end else hit
        for hit in hits
    ]


def _is_root(hit: SignatureHit) -> bool:
    return hit.signature.role == "root"


def _mark_unproven_hits(hits: Sequence[SignatureHit], scans: Sequence[LogScan]) -> list[SignatureHit]:
    """`hits`, where all but the last lines count as survived if no line shows that a process ended.

    A warning may be the last that a program tells which waits to start, not one that has trained.
    """
    if any(hit.is_end and not hit.survived and not hit.is_warning and hit.signature.role != "info" for hit in hits):
        return list(hits)
    trained = any(scan.has_steps for scan in scans)
    return [
        hit if hit.is_last and not (hit.is_warning and trained) else structs.replace(hit, survived=True) for hit in hits
    ]


def _mark_consequences(hits: Sequence[SignatureHit]) -> Iterator[SignatureHit]:
    """`hits`, where a signature that follows others is a consequence wherever the same or no rank shows one of them.

    What a log reports soon after the user interrupted the program is one, too.
    """
    interrupts = [hit for hit in hits if hit.signature.name == INTERRUPT and not hit.survived]
    shown: dict[str, set[int | None]] = {}
    for hit in hits:
        if not hit.survived:
            shown.setdefault(hit.signature.name, set()).add(hit.rank)
    for hit in hits:
        ranks = set[int | None]().union(*(shown.get(name, ()) for name in hit.signature.follows))
        is_stopped = any(_follows_interrupt(hit, each) for each in interrupts)
        if is_stopped or (ranks and (hit.rank is None or hit.rank in ranks or ranks == {None})):
            hit = structs.replace(hit, signature=structs.replace(hit.signature, role="cascade"))
        yield hit


def _follows_interrupt(hit: SignatureHit, interrupt: SignatureHit) -> bool:
    is_same = hit.log.name == interrupt.log.name and hit.offset == interrupt.offset
    return is_same and hit.signature.role == "root" and 0 < hit.index - interrupt.index <= INTERRUPT_LINES


def _put_reason_first(ordered: list[list[SignatureHit]]) -> list[list[SignatureHit]]:
    """`ordered`, where an error of the operating system precedes the first cause if that is the operation it met."""
    first = ordered[0] if ordered else []
    if not first or first[0].signature.layer != "operation" or first[0].signature.role != "root":
        return ordered
    for group in ordered[1:]:
        is_reason = group[0].signature.layer == "system" and group[0].signature.role == "root"
        if is_reason and any(_is_near(hit, met) for hit in first[:NUM_FACT_HITS] for met in group[:NUM_FACT_HITS]):
            return [group, *(each for each in ordered if each is not group)]
    return ordered


def _is_near(hit: SignatureHit, met: SignatureHit) -> bool:
    is_same = hit.log.name == met.log.name and hit.offset == met.offset
    return is_same and abs(hit.index - met.index) <= REASON_DISTANCE and hit.survived == met.survived


def _get_hit_shape(hit: SignatureHit) -> tuple[str, str]:
    return hit.signature.name, "".join(letter for letter in hit.text[hit.around :] if not letter.isdigit())


def _locate_hit(hit: SignatureHit, blocks: Sequence[RootCauseBlock], evidence: RunEvidence) -> SignatureHit:
    """`hit` with its rank and host, if torchrun's report or the run folder has them."""
    if hit.rank is None:
        for block in blocks:
            is_near = 0 < hit.index - block.index < BLOCK_LINES
            if block.log is hit.log and block.offset == hit.offset and is_near:
                host = block.host or evidence.find_host(block.rank)
                return structs.replace(hit, rank=block.rank, host=host, time=block.time, is_own_time=True)
        return hit
    return hit if hit.host else structs.replace(hit, host=evidence.find_host(hit.rank))


def _find_first_failure(evidence: RunEvidence, blocks: Sequence[RootCauseBlock]) -> tuple[int | None, str | None]:
    """The rank that failed first by the reports of ranks and torchrun, whatever the logs show."""
    if evidence.failures:
        return evidence.failures[0].rank, evidence.failures[0].host
    if blocks:
        return blocks[0].rank, blocks[0].host
    silent = [
        (heartbeat.time, rank)
        for rank, heartbeat in evidence.heartbeats.items()
        if heartbeat.phase and heartbeat.phase != "exit" and heartbeat.time
    ]
    if silent and len(silent) < len(evidence.heartbeats):
        return min(silent)[1], evidence.find_host(min(silent)[1])
    return None, None


def _get_time_order(hit: SignatureHit) -> tuple[float, bool, int, int, int]:
    """Order of occurrence: by time, then by the rank whose log it is, and within a log by place."""
    time = hit.time if hit.time is not None else math.inf
    return time, not hit.is_own_time, hit.log.rank if hit.log.rank is not None else 1 << 30, hit.offset, hit.index


def _get_likelihood_order(group: Sequence[SignatureHit], first_rank: int | None) -> tuple[object, ...]:
    """Sorts the likeliest cause first. Between equals the first occurrence counts: by time, then by place.

    What training survived is no cause.
    """
    signature = group[0].signature
    is_told = not signature.exit_codes or any(signature.matches(hit.text) for hit in group)
    strength = _STRENGTHS[signature.strength if is_told else "weak"]  # an exit code tells only how a process ended
    if signature.role == "root":
        strength += _DOUBTFUL if all(hit.is_doubtful for hit in group) else 0.0
        strength += _UNPROVEN if signature.strength == "likely" and not any(hit.is_end for hit in group) else 0.0
    shows_first = first_rank is not None and any(hit.rank == first_rank for hit in group)
    time = next((hit.time for hit in group if hit.time is not None), math.inf)
    first = min(group, key=lambda hit: (hit.log.name, hit.offset, hit.index))
    place = first.log.name, first.offset, first.index, -signature.find_words(first.text)  # a line tells the reason last
    return (
        all(hit.survived for hit in group),
        _ROLES[signature.role],
        strength,
        not shows_first,
        time,
        place,
        signature.name,
    )


def _build_cause(group: Sequence[SignatureHit], evidence: RunEvidence, seen_before: Callable[[str], bool]) -> Cause:
    signature = group[0].signature
    ranks = {hit.rank for hit in group if hit.rank is not None}
    return Cause(
        signature=signature.name,
        summary=signature.cause + _format_facts(group),
        role=signature.role,
        action=_choose_action(signature, seen_before),
        fix=signature.fix,
        evidence=tuple(_build_evidence(hit, evidence) for hit in _choose_evidence_hits(group)),
        ranks=tuple(sorted(ranks)),
        count=len(group),
        survived=all(hit.survived for hit in group),
        is_proven=any(hit.is_end for hit in group),
        source=signature.source,
    )


def _format_facts(group: Sequence[SignatureHit]) -> str:
    """What the lines tell by the signature's expressions: ` (address 10.0.0.1, port 29500)`."""
    facts: dict[str, dict[str, None]] = {}
    for regex in group[0].signature.facts:
        for hit in group[:NUM_FACT_HITS]:
            found = compile_regex(regex).search(hit.text)
            for name, value in (found.groupdict() if found else {}).items():
                if value:
                    facts.setdefault(name.replace("_", " "), {})[" ".join(log_line.shorten_line(value).split())] = None
    words = [f"{name} {_join_values(list(values))}" for name, values in facts.items()]
    return f" ({', '.join(words)})" if words else ""


def _join_values(values: list[str]) -> str:
    if all(value.isdecimal() for value in values):
        values.sort(key=int)
    return ", ".join(values[:MOST_FACTS]) + (
        f" and {len(values) - MOST_FACTS} more" if len(values) > MOST_FACTS else ""
    )


def _choose_action(signature: Signature, seen_before: Callable[[str], bool]) -> Action:
    if signature.first_action is None or seen_before(signature.name):
        return signature.action
    return signature.first_action


def _choose_evidence_hits(group: Sequence[SignatureHit]) -> list[SignatureHit]:
    """First occurrences: one of each log before a second of the same log."""
    first: dict[str, SignatureHit] = {}
    others = [hit for hit in _merge_repeated_hits(group) if first.setdefault(hit.log.name, hit) is not hit]
    return sorted([*first.values(), *others][:NUM_EVIDENCE], key=_get_time_order)


def _merge_repeated_hits(group: Sequence[SignatureHit]) -> Iterator[SignatureHit]:
    """`group`, where a rank's report only adds its time to the line in the rank's log."""
    reports: dict[int | None, SignatureHit] = {}
    for hit in group:
        if hit.log.name.endswith(ERROR_SUFFIX):
            reports.setdefault(hit.rank, hit)
    merged: set[int | None] = set()
    for hit in group:
        own = reports.get(hit.rank)
        if own is not None and own.text in hit.text and not hit.log.name.endswith(ERROR_SUFFIX):
            merged.add(hit.rank)
            yield hit if hit.is_own_time else structs.replace(hit, time=own.time, is_own_time=True)
        elif not hit.log.name.endswith(ERROR_SUFFIX):
            yield hit
    yield from (hit for rank, hit in reports.items() if rank not in merged)


def _build_evidence(hit: SignatureHit, evidence: RunEvidence) -> Evidence:
    return Evidence(
        file=hit.log.name,
        line=count_lines_before(hit.log, hit.offset) + hit.index + 1,
        text=log_line.shorten_line(hit.text, hit.around),
        rank=hit.rank,
        local_rank=hit.local_rank,
        host=hit.host or evidence.find_host(hit.rank),
        time=hit.time if hit.is_own_time else None,
    )


def _find_group_place(
    group: Sequence[SignatureHit], evidence: RunEvidence, first_rank: int | None
) -> tuple[int | None, str | None, int | None]:
    """Rank, host and local rank of the hit of `first_rank`, else of the first that has a rank, a local rank or a host.

    Several lines may blame several hosts: the one that most lines blame counts.
    """
    blamed = Counter(host for hit in group if (host := group[0].signature.find_blamed_host(hit.text)))
    if blamed:
        return None, blamed.most_common(1)[0][0], None
    for hit in sorted(group, key=lambda hit: hit.rank != first_rank):
        if hit.rank is not None:
            return hit.rank, hit.host or evidence.find_host(hit.rank), hit.local_rank
    first = next((hit for hit in group if hit.local_rank is not None or hit.host), group[0])
    return None, first.host, first.local_rank


def format_place(rank: int | None, host: str | None, local_rank: int | None = None) -> str:
    """` (rank 3 on node1)`."""
    place = describe_place(rank, host, local_rank)
    return f" ({place})" if place else ""


def describe_place(rank: int | None, host: str | None, local_rank: int | None) -> str:
    """`rank 3 on node1`, or what of it is known."""
    words = [f"rank {rank}"] if rank is not None else [f"local rank {local_rank}"] if local_rank is not None else []
    words += [f"on {host}" if words else host] if host else []
    return " ".join(words)


def _answer_with_effects(
    causes: Sequence[Cause], evidence: RunEvidence, victims: set[int | None], timeout: CollectiveTimeout | None
) -> dict[str, object]:
    """Action and reason if no root is known."""
    first = evidence.failures[0] if evidence.failures else None
    action: Action = first.action if first else "retry"
    effects = [cause for cause in causes if cause.role in ("symptom", "cascade") and not cause.survived]
    if first and first.rank not in victims:
        return {
            "action": action,
            "reason": f"{log_line.shorten_line(first.problem)}{format_place(first.rank, first.host)}",
        }
    if timeout and effects[0].signature == collective_timeout.SIGNATURE:
        rank = timeout.missing[0] if timeout.missing else None
        lead = structs.replace(effects[0], summary=timeout.reason)
        place = {} if rank is None else {"first_rank": rank, "first_host": evidence.find_host(rank)}
        return {"action": action, "reason": timeout.reason, "causes": (lead, *causes[1:]), **place}
    if effects and effects[0].role == "symptom":
        return {"action": action, "reason": effects[0].summary}
    if effects:
        return {"action": action, "reason": f"the logs show only consequences: {effects[0].summary}"}
    return {"action": action, "reason": ""}
