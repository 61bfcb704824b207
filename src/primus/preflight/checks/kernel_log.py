"""Checks of the kernel log since boot."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Iterator

from msgspec import Struct

from primus.diagnosis.signature import Signature
from primus.diagnosis.signature_files import get_signature_table
from primus.preflight.findings.finding import CheckFinding
from primus.preflight.findings.node import PreflightNode
from primus.preflight.findings.rules import About, judge, report_info

LIMIT_S = 3.0
DAMAGE = ("gpu-uncorrectable-ecc", "gpu-lost", "gpu-ipc-handle")
"""Signatures of failed runs that indicate damage of the node although they are not kernel messages."""


class SuspectPattern(Struct, frozen=True):
    """Lines that are not signs of a failure of a device but should be looked at."""

    regex: str
    """Regular expression, case-insensitive; its group `count` is the number of events in a line."""
    reason: str = "it may indicate damage (AMD-AGI/Primus node_smoke)"
    advice: str = "check the named device; drain the node if it recurs"
    name: str = ""
    """Name in the report, instead of the expression."""
    count: int = 1
    """Events that are needed."""

    def count_events(self, lines: Iterable[str]) -> int:
        """Number of events in `lines`, each of which matches."""
        found = (re.search(self.regex, line, re.IGNORECASE) for line in lines)
        # "0 CE memory read error" of skx_edac is one error: it counts those that it could not report.
        return sum(max(1, int(match.groupdict().get("count") or 1)) for match in found if match)


SUSPECT = (
    SuspectPattern("gpu reset"),
    SuspectPattern(
        r"hung_task|blocked for more than \d+ seconds",
        "processes were stuck in the kernel, usually while they waited for storage (Linux kernel/hung_task.c)",
        "check the drive or file server that the call trace below the line waits for",
        "hung task",
    ),
    SuspectPattern(
        r"\bI/O error,? (on )?dev (?!fd\d|sr\d|loop\d)",
        "a drive did not read or write (Linux block/blk-core.c)",
        "check the drive that the line names",
        "I/O error",
    ),
    SuspectPattern(
        "critical temperature reached",
        "a part of the node was so hot that it shuts down (Linux drivers/thermal/thermal_core.c)",
        "check the node's cooling",
        "critical temperature",
    ),
    SuspectPattern(
        "NIC Link is Down",
        "a network interface lost its link (Linux drivers/net/ethernet/intel)",
        "check the cable and the switch port of the interface that the line names",
        "link down",
    ),
    SuspectPattern(
        r"EDAC (\w+ )?\w+: (?P<count>\d+) CE\b",
        "a memory module has many corrected errors, which may become uncorrectable (Linux drivers/edac/edac_mc.c)",
        "replace the memory module that the line names",
        "corrected memory errors",
        count=10,  # in a day for one module: mcelog.conf(5), ce-error-threshold
    ),
    SuspectPattern("page allocation failure"),
    SuspectPattern("hardware error"),
    SuspectPattern(r"\*ERROR\*"),
    SuspectPattern("amdgpu.*(error|fail|timeout)"),
)

_HARMLESS = re.compile(
    r"severity[=:] ?correct(ed|able)|HEST: Enabling Firmware First"
    r"|Corrected error|no (user )?action (is )?(required|needed)"  # mce_amd.c, amdgpu_ras.c
    r"|_STATUS\[[^\]]*\bCE\b"
    r"|Machine check events logged"  # for any event; the following lines have the details
    r"|Hardware Error\]: +(Error Addr|PPIN|IPID|TSC|PROCESSOR|cache level|Syndrome|CPU:|Machine Check: 0 )"
    r"|\b0 (new )?(un)?correctable hardware error",
    re.IGNORECASE,
)
"""Corrected errors, and details of other errors; the checks of devices count them."""


def check_kernel_log(node: PreflightNode) -> Iterator[CheckFinding]:
    """Match the lines since boot, at most those of the last hours, against the signature table."""
    if node.expected.skips_kernel_log:
        yield report_info("host.kernel_log", "not read: --skip-dmesg")
        return
    if not node.tree.is_live:
        return
    lines, problem = _read_log(node)
    if lines is None:
        yield node.judge("host.kernel_log/unreadable", False, problem)
        return
    found = list(find_signatures(lines, node.limits.kernel_log_hours))
    yield from found or [node.judge("host.kernel_log", True, number=len(lines))]


def find_signatures(lines: Iterable[str], hours: float) -> Iterator[CheckFinding]:
    """One finding for each signature with enough matching lines, unless all its lines are already part of a finding."""
    suspects = _drop_recovered_lines(
        line for line in lines if _compile_suspect_pattern().search(line) and not _HARMLESS.search(line)
    )
    named: set[str] = set()

    def make_finding(hits: list[str], least: int, **words: str) -> Iterator[CheckFinding]:
        if len(hits) >= least and not named.issuperset(hits):
            # The signatures are in the order of priority: a line that several of them match is reported once.
            named.update(hits)
            about, last = About(words.pop("subject")), hits[-1].strip()[:160]
            row = "host.kernel_log/sign"
            yield judge(row, False, last, about, number=len(hits), hours=hours, least=least, **words)

    for signature in _list_damage_signatures():
        yield from make_finding(
            [line for line in suspects if signature.matches(line)],
            signature.count,
            status="fail" if signature.strength == "certain" else "warn",
            cause=f"{signature.cause} ({signature.source})",
            fix=signature.fix,
            subject=signature.name,
        )
    for pattern in SUSPECT:
        hits = [line for line in suspects if re.search(pattern.regex, line, re.IGNORECASE)]
        words = {"cause": pattern.reason, "fix": pattern.advice, "subject": pattern.name or pattern.regex}
        if pattern.count_events(hits) >= pattern.count:
            yield from make_finding(hits, 1, status="warn", **words)


def _drop_recovered_lines(lines: Iterable[str]) -> list[str]:
    """The lines without those that a later message of the driver ends: a GPU needs no recovery any more (Xid 154), or a
    link is up again, unless it went down `NUM_FLAPS` times."""
    kept: list[str] = []
    num_downs: dict[str, int] = {}
    for line in lines:
        if recovered := _RECOVERED.search(line):
            kept = [before for before in kept if f"Xid ({recovered[1]})" not in before]
        elif is_up := _LINK_UP.search(line):
            downs = [before for before in kept if f"{is_up[1]} NIC Link is Down" in before]
            num_downs[is_up[1]] = num_downs.get(is_up[1], 0) + len(downs)
            if num_downs[is_up[1]] < NUM_FLAPS:
                kept = [before for before in kept if before not in downs]
        else:
            kept.append(line)
    return kept


_RECOVERED = re.compile(r"NVRM: Xid \(([^)]*)\): 154,.*to 0x0 \(None\)")
_LINK_UP = re.compile(r"(\S+) NIC Link is Up")
NUM_FLAPS = 5
"""Losses of a link that are worth a look although it is up again, as for `kernel-link-down`."""


@functools.cache
def _list_damage_signatures() -> tuple[Signature, ...]:
    """Signatures that indicate damage of the node, not a fault of the program. Certain ones make the node unfit."""
    table = get_signature_table()
    kernel = (each for each in table.signatures if each.is_kernel and each.strength in ("certain", "likely"))
    return (*(table.by_name[name] for name in DAMAGE), *kernel)


@functools.cache
def _compile_suspect_pattern() -> re.Pattern[str]:
    texts = (re.escape(pattern.text) for signature in _list_damage_signatures() for pattern in signature.patterns)
    return re.compile("|".join([*texts, _LINK_UP.pattern, *(each.regex for each in SUSPECT)]), re.IGNORECASE)


_TIMESTAMP = re.compile(r"\[\s*(\d+\.\d+)\]")


def _read_log(node: PreflightNode) -> tuple[list[str] | None, str]:
    """Lines of the kernel log within the time limit, from dmesg or else from the journal."""
    uptime_s = float((node.tree.read_text("proc/uptime") or "0").split()[0])
    hours = node.limits.kernel_log_hours
    answer = node.run_program(["dmesg"], LIMIT_S)
    if answer.state == "ok":
        return select_recent_lines(answer.text.splitlines(), uptime_s - hours * 3600), ""
    # Many distributions reserve dmesg for root, but let members of the groups adm and systemd-journal read the
    # journal.
    journal = node.run_program(
        ["journalctl", "--dmesg", "--boot", "--no-pager", "--output=short-monotonic", f"--since=-{hours * 60:.0f}min"],
        LIMIT_S,
    )
    if journal.state == "ok" and "No entries" not in journal.text:
        return journal.text.splitlines(), ""
    return None, answer.problem


def select_recent_lines(lines: Iterable[str], since_s: float) -> list[str]:
    """Lines from `since_s` seconds after boot on; a line without a timestamp is kept."""
    kept = []
    for line in lines:
        stamp = _TIMESTAMP.search(line)
        if stamp is None or float(stamp[1]) >= since_s:
            kept.append(line)
    return kept


CHECKS = (check_kernel_log,)
