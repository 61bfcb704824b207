"""Rank, host and time of one line of a log, and how a line is shown."""

from __future__ import annotations

import re
import time
from datetime import datetime, timezone

from primus.redaction import redact_log_text

LONGEST = 300
"""Characters shown of a line."""

ANSI = re.compile(rb"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-Z\\-_])")
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f]")

_RANK = re.compile(
    r"\[rank[ -]?(\d+)(?:/\d+)?\]|\[(?:[^\[\]]*\b)?Rank (\d+)\]"
    r"|\b[Rr]ank\s*[:=]?\s*(\d+)"
    r"(?: was killed| ended with| status failed | with PID | \(PID \d+\) exited| crashed with| on | of \d"
    r"|\)|\]| \| | \(local_rank)"
    r'|"global_rank": (\d+)|^\[\d+,(\d+)\]<std|:\d\d \d{4}\[(\d+)\]<std|^\s*Process name: \[\[\d+,\d+\],(\d+)\]'
)
_BLAMED_RANK = re.compile(r"\bUnexpected result \S+ on rank (\d+)\b|\b[Rr]ank (\d+): found (?:NaN|Inf)\b")
"""Megatron-LM's checks of results name the rank that had the value; the line's prefix is the rank that prints."""
_LOCAL_RANK = re.compile(
    r"local_rank:? (\d+)|^\s*\[default(\d+)\]:|'local_rank %s FAILED .*', (\d+)\)|^-- Process (\d+) terminated"
    r"|'--local_rank=(\d+)'.* exits with return code"
)
"""torchrun numbers the ranks of each node from 0 in reports and prefixes of `--tee`; DeepSpeed in commands."""
_TASK = re.compile(r"\btask (\d+): |^ *(\d+): ")
_NO_HOST = (
    r"(?i:[\w.-]*(?:error|rank|python|epoch|step|gpu|cuda|iter|layer|bash|exception|warning|lib|line|default|\.py)[\w.-]*"
    r"|(?:mlx|nvme|eth|ib|sd|md|dm|sha|ipv|utf|http|s3|sm_?|gfx|mi|[ahvewif])-?\d[\w.-]*):"
)
"""Words with digits before a colon that begin a message, not the prefix of a host."""
_HOST_PREFIX = rf"(?!{_NO_HOST})(?:(?:\d+\.){{3}}\d+|[A-Za-z][\w-]*\d[\w.-]*): "
"""pdsh, which DeepSpeed uses, puts the host before each line."""
_POD_ROW = r"^(?:\S+ +)?(?:pod/)?([a-z0-9][\w.-]*) +\d+/\d+ +\w+(?:BackOff|Error|Killed|Evicted)\b"
_HOST = re.compile(
    r"srun: error: ([\w.-]+): task|\[NODE-\d+\(([\w.-]+)\)\]|\] attempt \d+ on ([\w.-]+)|^\s*host\s+: ([\w.-]+)"
    r"|(?:srun|salloc): error: Node failure on ([\w.-]+)"
    r"|\*\*\* (?:STEP|JOB) \S+ ON ([\w.-]+)(?![\w.-]| CANCELLED AT \S+ DUE TO NODE FAILURE)"
    r"|^(?:\[[^\]]*\](?:<std\w+>)?:? ?|\([^)]*\) )*((?=[\w.-]*[A-Za-z-])\w[\w.-]*):\d+:\d+ \[\d+\]"
    r"|\bnode ([\w.-]+), device \d"
    r"|connect to host ([\w.-]+) port|Connection to ([\w.-]+) closed|^\S+@([\w.-]+): Permission denied \("
    rf"|{_POD_ROW}"
    r"|\bWorker IP address: ([\d.]+)"
    r"|\bfailed on node ([\w.-]+):|\bon node ([\w-]*\d[\w-]*)\b|\bnode: ([\w-]*\d[\w-]*)\b"
    r"|\bPod: (?:[\w-]+\.)?([\w-]+) exited with code|\bpod ([\w-]+-\d+) container"
    r"|^(?:\[[\d.]+\] )?\[([A-Za-z][\w.-]*):\d+(?::\d+)?\]"
    r"|^[A-Z][a-z]{2} +\d+ [\d:]{8} ([\w.-]+) [\w./-]+(?:\[\d+\])?: |^20\d\d-\d\d-\d\dT\S+ ([a-z][\w.-]*\d[\w.-]*) "
    r"|^(?:[\w-]+\.)?([a-z][\w-]*\d) \[std(?:err|out)\] "
    r'|"hostname": "([\w.-]+)"|\] \[([\w.-]+)\] - Abort\('
    rf"|^(?:\s*\d+: )?(?={_HOST_PREFIX})([^:]+):"
)
"""srun and Slurm, Primus, NCCL, ssh, `kubectl get pods`, Ray, Kubernetes' operators, Open MPI and UCX, syslog,
milabench, events of torchelastic, MPICH, and pdsh.

Where Slurm ends a step because a node is lost, the line names the node that writes it, which is another one.
"""
_POD_EVENT = re.compile(
    r"^\s*(?:Warning +\w+ .*\b(?:kubelet|\w*scheduler|\w+-controller)\b|(?:Reason|Exit Code|Message): )"
    r"|^The actor is dead because "
)
_POD = re.compile(rf"^Name: +([\w.-]+)$|^([a-z0-9][\w.-]*) +0/\d+ +Pending\b|{_POD_ROW}|^\s+ip: ([\d.]+)$")
_TIMESTAMP = r"\[?20\d\d-\d\d-\d\d[T ][\d:.,]+(?:Z|[+-]\d\d:?\d\d)?\]? (?:std(?:out|err) [FP] )?"
_RANK_PREFIX = (
    r"\s{0,3}\[(?:default|rank)[ -]?\d+\]:? ?|\s{0,3}\d+: |localhost: |\s{0,3}\([\w.-]+ pid=\d+(?:, ip=[\d.]+)?\) ?"
    r"|[A-Z][a-z]{2} [A-Z][a-z]{2} +\d+ [\d:]{8} \d{4}\[\d+\]<std(?:out|err)>:"
    r"|\([\w.-]+, rank=\d+, pid=\d+(?:, ip=[\d.]+)?\) ?|- \w+ - INFO - (?=\[rank\d)"
    r"|(?:\[\d+,\d+\]<)?std(?:err|out)(?:>: ?|: )"
    r"|[\w.-]+ \[std(?:err|out)\] |[\w.-]+ {1,9}\|{1,2} |(?:ERROR|CRITICAL) \d\d-\d\d [\d:]{8} \[?[\w.]+:\d+\] ?"
)
_PREFIX = re.compile(rf"^(?:{_RANK_PREFIX}|{_HOST_PREFIX}|{_TIMESTAMP})+")
_TIMESTAMPS = re.compile(_TIMESTAMP)
"""Prefixes of torchrun, srun --label, Ray, mpirun, Horovod, accelerate, pdsh, SkyPilot, log collectors, loggers that
write the output of ranks, vLLM and container runtimes."""

_WARNING = re.compile(
    r"^\[W\d* ?[\d:. ]*\S*:\d+\]|^W\d{4} \d\d:|^(?:\S+ ){0,3}: W \S+:\d+\]|^\S* ?\S*: W \w+/|\[WARNING *\]"
    r"|\bWARNING\b ?[:|-]|\b\w*Warning: |\bThis is a warning\b|^[Ww]arning: | - WARNING - "
    r"|^W \d+ \d+\] |^wandb: (?:ERROR|WARNING|Network error)|\bERROR +\S* ?:\d+ \[\w+\.py:\w+\(\):\d+\]"
)
"""Levels of glog, Ray, logging and warnings; and wandb's process beside the training, whose errors do not end it."""
_INFO = re.compile(r"\bNCCL INFO\b|\bUCX +(?:INFO|DIAG|DEBUG|TRACE)\b")
_LOW_LEVEL = re.compile(
    r'^I\d{4} \d\d:|^I \d+ \d+\] |"level": ?"(?:INFO|DEBUG|info|debug)"|\blevel=(?:info|debug)\b'
    r"|\[(?:INFO|DEBUG) *\]|\b(?:INFO|DEBUG)\b(?: ?[:|]| - )"
)
"""Levels below a warning: of glog, of Ray, of lines in JSON, of Go's loggers and of logging."""
_CLOCK = r"(?P<hour>[0-2]\d):(?P<minute>[0-5]\d):(?P<second>[0-6]\d)(?:[.,](?P<part>\d{1,9}))?"
_DATE = re.compile(
    r"(?P<year>20\d\d)[-/]?(?P<month>[01]\d)[-/]?(?P<day>[0-3]\d)[T _]" + _CLOCK + r"\s?(?P<zone>Z\b|[+-]\d\d:?\d\d\b)?"
)
_GLOG = re.compile(r"(?:^|[\s\[:])[IWEFC](?P<month>0?[1-9]|1[0-2])(?P<day>[0-3]\d) " + _CLOCK)
_SYSLOG = re.compile(r"^(?P<name>Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec) +(?P<day>\d{1,2}) " + _CLOCK)
_MONTHS = "Jan Feb Mar Apr May Jun Jul Aug Sep Oct Nov Dec".split()


def decode_plain_text(raw: bytes) -> str:
    """`raw` as text without colors and control characters; bytes that are not UTF-8 are replaced."""
    text = ANSI.sub(b"", raw).decode("utf-8", "replace")
    return _CONTROL.sub("", text).rstrip()


def strip_rank_prefix(text: str) -> str:
    """`text` without the prefixes of launchers and log collectors: `[default0]:`, `[rank7]:`, `7: `, timestamps."""
    return _PREFIX.sub("", text)


def split_rank_prefix(text: str) -> tuple[str, str]:
    """The rank's prefix without timestamps, and the rest: lines of one rank have equal prefixes."""
    found = _PREFIX.match(text)
    return (_TIMESTAMPS.sub("", found[0]), text[found.end() :]) if found else ("", text)


def shorten_line(text: str, around: int = 0) -> str:
    """`text` without secrets, shortened around the character `around`."""
    begin = max(0, min(around - LONGEST // 3, len(text) - LONGEST)) if len(text) > LONGEST else 0
    safe_begin = text.rfind(" ", 0, begin) + 1 if begin else 0  # redaction needs whole words
    shown = redact_log_text(text[safe_begin : begin + 2 * LONGEST])[: LONGEST + begin - safe_begin]
    after = "..." if begin + LONGEST < len(text) else ""
    return ("..." if safe_begin else "") + shown.strip() + after


def find_rank(text: str, tasks_are_ranks: bool = False) -> int | None:
    """Rank that wrote the line, or that the line blames."""
    found = _BLAMED_RANK.search(text) or _RANK.search(text) or (tasks_are_ranks and _TASK.search(text)) or None
    return _parse_rank_number(found) if found else None


def find_local_rank(text: str) -> int | None:
    """Rank within its node of the process that wrote the line, or that the line blames."""
    found = _LOCAL_RANK.search(text)
    return _parse_rank_number(found) if found else None


def is_warning(text: str) -> bool:
    """Whether the line's own level says that the program goes on. NCCL's `WARN` reports errors."""
    body = strip_rank_prefix(text)
    return _WARNING.search(body) is not None and not body.startswith("error: ")  # srun reports errors of its plugins so


def has_low_level(text: str) -> bool:
    """Whether the line's own level is below a warning: the program goes on."""
    return _LOW_LEVEL.search(strip_rank_prefix(text)) is not None


def is_info(text: str) -> bool:
    """Whether the line's level is that of NCCL's lines about its work, which it also writes at a normal end."""
    return _INFO.search(text) is not None


def _parse_rank_number(found: re.Match[str]) -> int | None:
    digits = next(group for group in found.groups() if group)
    return int(digits) if len(digits) < 8 else None


def find_host(text: str) -> str | None:
    """Host that wrote the line."""
    found = _HOST.search(text)
    return next(group for group in found.groups() if group) if found else None


def is_pod_event(text: str) -> bool:
    """Whether the line is an event of a pod or a state of its container, as `kubectl describe pod` prints them.

    Ray reports the end of an actor in the same way: the lines above tell where it was.
    """
    return _POD_EVENT.search(text) is not None


def find_pod(text: str) -> str | None:
    """The pod that a line of `kubectl describe pod` or a failed one that a line of `kubectl get pods` names.

    For an actor of Ray, the address of its node.
    """
    found = _POD.search(text)
    return next(group for group in found.groups() if group) if found else None


def find_time(text: str, near: float) -> float | None:
    """Time of the line in seconds since the epoch; local time unless the line has a time zone.

    Args:
        text: The line.
        near: A time that supplies a missing year, such as that of the file's last change.
    """
    head = text[:400]
    found = _DATE.search(head) or _GLOG.search(head) or _SYSLOG.search(head)
    if not found:
        return None
    parts = found.groupdict()
    month = int(parts["month"]) if parts.get("month") else _MONTHS.index(parts["name"]) + 1
    clock = (int(parts["day"]), int(parts["hour"]), int(parts["minute"]), int(parts["second"]))
    fraction = float(f"0.{parts['part']}") if parts.get("part") else 0.0
    if parts.get("year"):
        return _compute_epoch_seconds(int(parts["year"]), month, clock, parts.get("zone"), fraction)
    year = time.localtime(near).tm_year
    this = _compute_epoch_seconds(year, month, clock, None, fraction)
    is_last_year = this is not None and this > near + 2 * 86400
    return _compute_epoch_seconds(year - 1, month, clock, None, fraction) if is_last_year else this


def _compute_epoch_seconds(
    year: int, month: int, clock: tuple[int, int, int, int], zone: str | None, part: float
) -> float | None:
    day, hour, minute, second = clock
    try:
        moment = datetime(year, month, day, hour, minute, min(second, 59), tzinfo=timezone.utc)
    except ValueError:  # the 31st of a shorter month: these digits were not a time
        return None
    if zone is None:
        return time.mktime((year, month, day, hour, minute, second, -1, -1, -1)) + part
    if zone == "Z":
        return moment.timestamp() + part
    sign = 1 if zone[0] == "+" else -1
    offset = int(zone[1:3]) * 3600 + int(zone[-2:]) * 60
    return moment.timestamp() + part - sign * offset
