"""The list of unfit nodes, which jobs avoid: a folder of small records that a user, or a whole site, shares.

Every record is a file of its own. It is written by rename, never changed afterwards, and removed only when it has
expired. Jobs that write at the same time therefore need no lock, which shared file systems often keep to one host, and
none can lose what another one has written. What is known of a node follows from all its records:

    failure    an attempt failed for a cause of this node; UNFIT_AFTER of them, from different attempts, make it unfit
    unfit      preflight, or a person, found it unfit
    fit        a check, or a person, found it fit: earlier records of the node do not count any more
"""

from __future__ import annotations

import contextlib
import getpass
import os
import re
import stat
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Literal

import msgspec
from msgspec import Struct

from primus.errors import UsageError
from primus.runs.files import UNFIT_NODES_VARIABLE, find_unfit_nodes_folder, write_json

FORMAT = 1
"""Version of the records."""
UNFIT_AFTER = 2
"""Failures that make a node unfit: one may be chance, or the fault of the job; a second one on the same node is not
(the limit of docs/supervision.md for hangs)."""
EXPIRY_DAYS = 7.0
"""Days for which a record counts. A node that is repaired comes back without anybody's help, and one that is not fails
again and is recorded again; within a week most sites repair or drain a node."""
DAY_S = 86400.0
KEPT_DAYS = 30.0
"""Days for which an expired record stays, as history for `nodes list --all`."""
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.:-]*")
_ADDRESS = re.compile(r"[\d.]+|.*:.*")

Source = Literal["user", "preflight", "diagnosis"]


class NodeRecord(Struct, frozen=True, kw_only=True):
    """One file of the list. Unknown fields, of a newer version, are ignored."""

    version: int = FORMAT
    node: str
    """Name that its scheduler knows; for ssh, its host name."""
    kind: Literal["failure", "unfit", "fit"]
    reason: str
    time: float
    """Seconds since the epoch."""
    expires: float | None = None
    """Seconds since the epoch; None for a record that counts until the node is found fit."""
    source: Source = "user"
    user: str = ""
    """Who wrote it."""
    host: str = ""
    """Where it was written."""
    run: str = ""
    """Run folder whose attempt failed; for preflight, its id."""
    attempt: int | None = None
    signature: str = ""
    """Name of the failure signature."""
    line: str = ""
    """The line of a log that shows it, with file and number."""


class UnfitNode(Struct, frozen=True, kw_only=True):
    """A node with records that count."""

    node: str
    is_unfit: bool
    """False for a node with fewer failures than make it unfit."""
    reason: str
    since: float
    expires: float | None
    records: tuple[NodeRecord, ...]
    """Those that count, oldest first."""

    def format_reason(self) -> str:
        """Why it is unfit, and for how long."""
        until = f" until {format_day(self.expires)}" if self.expires is not None else ""
        return f"{self.reason} (since {format_day(self.since)}{until})"


class UnfitNodes(Struct, frozen=True, kw_only=True):
    """The list as it was read."""

    folder: str = ""
    nodes: tuple[UnfitNode, ...] = ()
    """Unfit nodes and suspects, by name."""
    notes: tuple[str, ...] = ()
    """What of the list is not used, and why."""
    records: tuple[NodeRecord, ...] = ()
    """All records, the expired ones too, oldest first."""

    @property
    def unfit(self) -> tuple[UnfitNode, ...]:
        """The unfit nodes."""
        return tuple(each for each in self.nodes if each.is_unfit)

    def find(self, name: str) -> UnfitNode | None:
        """The unfit node that `name` means; a domain may be missing on either side."""
        return next((each for each in self.unfit if is_same_node(each.node, name)), None)


NO_NODES = UnfitNodes()


def read_unfit_nodes(environ: Mapping[str, str], now: float | None = None) -> UnfitNodes:
    """The list. It never stops a job: what cannot be read becomes a note.

    Args:
        environ: Variables with the folder.
        now: Seconds since the epoch (default: the time of this machine).
    """
    folder = find_unfit_nodes_folder(environ)
    if folder is None:
        return NO_NODES
    notes: list[str] = []
    if UNFIT_NODES_VARIABLE in environ and not os.path.isdir(folder):
        notes.append(f"the list of unfit nodes, {folder}, does not exist yet")
    records = sorted(_read_records(folder, notes), key=lambda each: (each.time, each.node))
    return _combine_records(folder, records, time.time() if now is None else now, notes)


def _read_records(folder: Path, notes: list[str]) -> Iterator[NodeRecord]:
    try:
        names = sorted(entry.name for entry in os.scandir(folder) if entry.name.endswith(".json"))
    except FileNotFoundError:
        return
    except OSError as error:
        notes.append(f"the list of unfit nodes cannot be read: {folder}: {error.strerror}")
        return
    newer = 0
    for name in names:
        if name.startswith("."):
            continue
        try:
            record = msgspec.json.decode((folder / name).read_bytes(), type=NodeRecord)
        except FileNotFoundError:  # removed meanwhile, because it has expired
            continue
        except OSError as error:
            notes.append(f"a record of unfit nodes cannot be read: {folder / name}: {error.strerror}")
        except msgspec.MsgspecError as error:
            what = "is of a newer primus" if _is_newer(folder / name) else f"is damaged: {error}"
            notes.append(f"a record of unfit nodes is not used: {folder / name} {what}")
        else:
            newer += record.version > FORMAT
            yield record
    if newer:
        notes.append(f"{newer} records of unfit nodes are of a newer primus: used as far as this one knows them")


def _is_newer(path: Path) -> bool:
    with contextlib.suppress(OSError, msgspec.MsgspecError):
        version = msgspec.json.decode(path.read_bytes(), type=dict[str, object]).get("version")
        return isinstance(version, int) and version > FORMAT
    return False


def _combine_records(folder: Path, records: Sequence[NodeRecord], now: float, notes: list[str]) -> UnfitNodes:
    found: list[UnfitNode] = []
    for name in sorted({each.node for each in records}):
        own = [each for each in records if each.node == name]
        fit = max((each.time for each in own if each.kind == "fit"), default=float("-inf"))
        own = [each for each in own if each.kind != "fit" and each.time > fit]
        valid = [each for each in own if each.expires is None or each.expires > now]
        node = _judge_node(name, valid)
        before = _judge_node(name, own)
        if before and before.is_unfit and not (node and node.is_unfit) and before.expires is not None:
            notes.append(f"the entry of {name} expired on {format_day(before.expires)}: {name} may be used again")
        if node:
            found.append(node)
    return UnfitNodes(folder=str(folder), nodes=tuple(found), notes=tuple(notes), records=tuple(records))


def _judge_node(name: str, records: Sequence[NodeRecord]) -> UnfitNode | None:
    """What records that count say of one node."""
    if not records:
        return None
    decided = [each for each in records if each.kind == "unfit"]
    # An attempt that is recorded twice, by a launcher that was started again, is one failure.
    failures = list({(each.run, each.attempt): each for each in records if each.kind == "failure"}.values())
    reasons = [each.reason for each in decided[-1:]]
    if failures:
        causes = ", ".join(dict.fromkeys(each.signature or each.reason for each in failures))
        reasons.append(f"{len(failures)} failure{'s' if len(failures) > 1 else ''} on it ({causes})")
    until = [each.expires for each in decided]
    if len(failures) >= UNFIT_AFTER:  # from the time at which too few failures are left
        until.append(sorted((each.expires for each in failures), key=_sort_expiry)[-UNFIT_AFTER])
    is_unfit = bool(until)
    until = until or [each.expires for each in failures]
    return UnfitNode(
        node=name,
        is_unfit=is_unfit,
        reason="; ".join(reasons),
        since=records[0].time,
        expires=max(until, key=_sort_expiry),
        records=tuple(records),
    )


def _sort_expiry(expires: float | None) -> float:
    return float("inf") if expires is None else expires


def add_record(
    environ: Mapping[str, str], record: NodeRecord, *, days: float | None = EXPIRY_DAYS, now: float | None = None
) -> NodeRecord:
    """Write a record; gives it with time, expiry and writer.

    Args:
        environ: Variables with the folder.
        record: What is known of the node.
        days: Days for which it counts; None for no limit.
        now: Seconds since the epoch (default: the time of this machine).

    Raises:
        UsageError: The name is not that of a node, or the user wants no list.
        PrimusError: The folder cannot be written.
    """
    folder = find_unfit_nodes_folder(environ)
    if folder is None:
        raise UsageError(
            f"{UNFIT_NODES_VARIABLE} is empty, so there is no list of unfit nodes", f"unset {UNFIT_NODES_VARIABLE}"
        )
    check_node_name(record.node)
    now = time.time() if now is None else now
    record = msgspec.structs.replace(
        record,
        time=now,
        expires=None if days is None else now + days * DAY_S,
        user=record.user or getpass.getuser(),
        host=record.host or os.uname().nodename,
    )
    # Unique over hosts, so that no two writers ever mean the same file.
    path = folder / f"{record.node.replace(':', '_')}.{int(now * 1000)}.{os.urandom(4).hex()}.json"
    write_json(path, record)
    _share_record(path)
    _remove_old_records(folder, now)
    return record


def clear_node(environ: Mapping[str, str], name: str, reason: str, source: Source = "user") -> NodeRecord | None:
    """Record that a node is fit, under the name by which the list knows it; None if it has no record that counts.

    Raises:
        PrimusError: The folder cannot be written.
    """
    cleared = None
    for each in read_unfit_nodes(environ).nodes:
        if is_same_node(each.node, name):
            record = NodeRecord(node=each.node, kind="fit", reason=reason, time=0, source=source)
            cleared = add_record(environ, record, days=None)
    return cleared


def _share_record(path: Path) -> None:
    """Let those read the record who may read the folder: a record that the umask of its writer hides helps nobody."""
    with contextlib.suppress(OSError):
        path.chmod(0o600 | stat.S_IMODE(path.parent.stat().st_mode) & 0o666)


def _remove_old_records(folder: Path, now: float) -> None:
    """Remove records that have been without effect for long; those of other users may stay."""
    for path in folder.glob("*.json"):
        with contextlib.suppress(OSError, msgspec.MsgspecError):
            record = msgspec.json.decode(path.read_bytes(), type=NodeRecord)
            is_old = now - record.time > KEPT_DAYS * DAY_S
            if is_old and (record.kind == "fit" or (record.expires is not None and record.expires < now)):
                path.unlink()


def check_node_name(name: str) -> None:
    """Raises UsageError if `name` cannot be that of a node."""
    if not _NAME.fullmatch(name) or len(name) > 200:
        raise UsageError(f"'{name}' is not the name of a node", "write the name that the scheduler shows, such as n3")


def is_same_node(one: str, other: str) -> bool:
    """Whether two names mean the same node: with or without a domain, in any case; addresses are compared as a
    whole."""
    one, other = one.lower(), other.lower()
    if one == other or _ADDRESS.fullmatch(one) or _ADDRESS.fullmatch(other):
        return one == other
    return one.partition(".")[0] == other.partition(".")[0] and not ("." in one and "." in other)


def find_unfit_among(listed: UnfitNodes, names: Iterable[str]) -> dict[str, UnfitNode]:
    """The unfit ones among `names`, by these names."""
    return {name: found for name in names if (found := listed.find(name))}


def format_day(seconds: float | None) -> str:
    """A time to the minute, as listings show it."""
    return "-" if seconds is None else time.strftime("%Y-%m-%d %H:%M", time.localtime(seconds))
