"""What a run folder records about a failed attempt besides its logs: errors, heartbeats, the launcher's reports."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from primus.diagnosis.logs import LogFile
from primus.diagnosis.scan import SignatureHit
from primus.diagnosis.signature import Signature
from primus.diagnosis.signature_files import get_signature_table
from primus.runs import events
from primus.runs.store import RankFailure, Run

SILENT_S = 30.0
"""A node whose heartbeats end this long before those of others failed first."""
_BY_END = {"lost node": "node-lost", "hang": "hang", "preempted": "preempted"}


class LastHeartbeat(Struct, frozen=True, kw_only=True):
    """The last heartbeat of a rank."""

    host: str = ""
    phase: str = ""
    step: int = 0
    time: float = 0.0


class RunEvidence(Struct, frozen=True, kw_only=True):
    """What the run folder records about an attempt."""

    failures: tuple[RankFailure, ...] = ()
    """Sorted by time."""
    heartbeats: Mapping[int, LastHeartbeat] = {}
    """Last heartbeats by rank."""
    hits: tuple[SignatureHit, ...] = ()
    """Signatures that are not lines of a log."""
    logs: tuple[LogFile, ...] = ()
    """Texts to scan like logs."""

    def find_host(self, rank: int | None) -> str | None:
        """Host of a rank."""
        for failure in self.failures:
            if failure.rank == rank:
                return failure.host
        heartbeat = self.heartbeats.get(rank) if rank is not None else None
        return heartbeat.host or None if heartbeat else None


def collect_run_evidence(run: Run, number: int) -> RunEvidence:
    """Everything that the run folder records about attempt `number`."""
    folder, place = run.attempt_folder(number), f"logs/attempt_{number}"
    failures = sorted(_read_failures(folder), key=lambda failure: (failure.time, failure.rank))
    heartbeats = dict(_read_heartbeats(folder))
    hits = [
        *_find_exit_hits(failures, place),
        *_find_hang_hits(folder, place),
        *_find_silent_node_hits(heartbeats, place),
    ]
    hits += _find_end_hits(run, number, {hit.signature.name for hit in hits})
    return RunEvidence(
        failures=tuple(failures),
        heartbeats=heartbeats,
        hits=tuple(hits),
        logs=tuple(_build_error_log(failure, place) for failure in failures),
    )


def _read_json_or_none(path: Path) -> Any:
    """JSON of a file; None if it is missing, half written or not JSON."""
    try:
        return msgspec.json.decode(path.read_bytes())
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError):
        return None


def _parse_rank(path: Path) -> int | None:
    number = path.name[len("rank_") :].partition(".")[0]
    return int(number) if number.isdecimal() else None


def _read_failures(folder: Path) -> Iterator[RankFailure]:
    for path in folder.glob("rank_*.error.json"):
        try:
            yield msgspec.convert(_read_json_or_none(path), RankFailure)
        except msgspec.ValidationError:  # half written, or of another version: the rank's log is read instead
            continue


def _read_heartbeats(folder: Path) -> Iterator[tuple[int, LastHeartbeat]]:
    for path in folder.glob("rank_*.heartbeat.json"):
        rank = _parse_rank(path)
        try:
            heartbeat = msgspec.convert(_read_json_or_none(path), LastHeartbeat)
        except msgspec.ValidationError:
            continue
        if rank is not None:
            yield rank, heartbeat


def _build_error_log(failure: RankFailure, place: str) -> LogFile:
    """The problem that a rank reported. Its hint is excluded: it is advice, not evidence."""
    return LogFile(
        name=f"{place}/rank_{failure.rank}.error.json",
        data=failure.problem.encode("utf-8", "replace"),
        rank=failure.rank,
        host=failure.host,
        time=failure.time,
    )


def _build_evidence_hit(signature: Signature, file: str, text: str, **place: Any) -> SignatureHit:
    log = LogFile(name=file, data=b"")
    return SignatureHit(signature=signature, log=log, offset=0, index=0, text=text, is_end=True, **place)


def _find_exit_hits(failures: list[RankFailure], place: str) -> Iterator[SignatureHit]:
    by_exit_code = get_signature_table().by_exit_code
    for failure in failures:
        signature = by_exit_code.get(failure.exit_code)
        if signature:
            file = f"{place}/rank_{failure.rank}.error.json"
            text = f"exit code {failure.exit_code}: {failure.problem}"
            yield _build_evidence_hit(
                signature, file, text, rank=failure.rank, host=failure.host, time=failure.time, is_own_time=True
            )


def _find_hang_hits(folder: Path, place: str) -> Iterator[SignatureHit]:
    """The launcher's report of a hang; fields may be missing, as older versions wrote fewer."""
    report = _read_json_or_none(folder / "hang.json")
    if not isinstance(report, dict):
        return
    ranks = [rank for rank in _convert_to_list(report.get("ranks", report.get("rank"))) if isinstance(rank, int)]
    hosts = [host for host in _convert_to_list(report.get("hosts", report.get("host"))) if isinstance(host, str)]
    where = f" in phase {report['phase']}" if "phase" in report else ""
    where += f" after step {report['step']}" if "step" in report else ""
    idle = f" for {report['seconds']} s" if "seconds" in report else ""
    problem = next((report[key] for key in ("reason", "problem") if isinstance(report.get(key), str)), "")
    for number, rank in enumerate(ranks or [None]):
        text = problem or f"no progress{idle}{where}"
        frame = _read_stack_frame(folder, rank)
        host = hosts[number] if number < len(hosts) else (hosts[0] if len(hosts) == 1 else None)
        time = report.get("time")
        yield _build_evidence_hit(
            get_signature_table().by_name["hang"],
            f"{place}/hang.json",
            text + (f"; in {frame}" if frame else ""),
            rank=rank,
            host=host,
            time=float(time) if isinstance(time, (int, float)) else None,
        )


def _convert_to_list(value: object) -> list[Any]:
    """`value` as a list."""
    if isinstance(value, (list, tuple)):
        return list(value)
    return [] if value is None else [value]


def _read_stack_frame(folder: Path, rank: int | None) -> str:
    """The innermost frame of a rank's main thread, by py-spy or faulthandler."""
    try:
        text = (folder / f"rank_{rank}.stacks.txt").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    lines = text.splitlines()
    begin = next((number for number, line in enumerate(lines) if "MainThread" in line), None)
    if begin is None:
        begin = next((number for number, line in enumerate(lines) if line.startswith("Current thread")), -1)
    found = next((line.strip() for line in lines[begin + 1 :] if "(" in line or 'File "' in line), "")
    return found[:160]


def _find_silent_node_hits(heartbeats: Mapping[int, LastHeartbeat], place: str) -> Iterator[SignatureHit]:
    """Nodes whose last heartbeats are much older than those of others, without a report that they ended."""
    newest: dict[str, float] = {}
    for heartbeat in heartbeats.values():
        newest[heartbeat.host] = max(newest.get(heartbeat.host, 0.0), heartbeat.time)
    last = max(newest.values(), default=0.0)
    for host, time in newest.items():
        ranks = [rank for rank, heartbeat in heartbeats.items() if heartbeat.host == host]
        if last - time < SILENT_S or any(heartbeats[rank].phase == "exit" for rank in ranks):
            continue
        first = min(ranks)
        text = f"the heartbeats of {host} end {last - time:.0f} s before those of other nodes"
        yield _build_evidence_hit(
            get_signature_table().by_name["node-lost"],
            f"{place}/rank_{first}.heartbeat.json",
            text,
            rank=first,
            host=host,
            time=time,
            is_own_time=True,
        )


def _find_end_hits(run: Run, number: int, known: set[str]) -> Iterator[SignatureHit]:
    """How the attempt ended according to the launcher, if nothing else shows this cause."""
    for event in events.read_events(run.events):
        if event["kind"] != "attempt_ended" or event.get("attempt") != number:
            continue
        signature = get_signature_table().by_name.get(_BY_END.get(str(event.get("end")), ""))
        if signature and signature.name not in known:
            hosts = [host for host in _convert_to_list(event.get("hosts")) if isinstance(host, str)]
            yield _build_evidence_hit(
                signature,
                "events.jsonl",
                f"attempt {number} ended: {event.get('end')}; {event.get('reason', '')}",
                host=hosts[0] if hosts else None,
                time=float(event["time"]),
                is_own_time=True,
            )
