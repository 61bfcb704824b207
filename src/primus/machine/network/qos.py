"""Traffic classes of AMD Pensando NICs, from `nicctl show qos`."""

from __future__ import annotations

import re

from primus.machine.tree import FileTree
from primus.process import run_command

COMMAND = ("nicctl", "show", "qos")
LIMIT_S = 5.0
CLASS_OF_DSCP = 4
"""A traffic class is a DSCP followed by two ECN bits (RFC 3168)."""


def read_traffic_classes(tree: FileTree) -> tuple[int, int] | None:
    """Traffic class of data and of control messages; None, usually with a problem, if the tool does not report them."""
    answer = run_command(COMMAND, limit_s=LIMIT_S)
    if answer.state == "missing":
        return None
    # A nicctl that failed may have printed some NICs: its output is used, and only a unique result counts.
    classes = parse_traffic_classes(answer.text)
    if len(classes) == 1:
        return classes.pop()
    problem = (
        "the NICs have different settings"
        if classes
        else answer.problem or "reports no lossless queue with a single DSCP"
    )
    tree.note_problem(" ".join(COMMAND), problem)
    return None


def parse_traffic_classes(text: str) -> set[tuple[int, int]]:
    """Traffic classes of data and of control messages of each NIC; NICs without them are skipped.

    Data uses the lossless priority (the one with most bandwidth, if several); control messages the strict priority, or
    that of the data (AMD-AGI/Primus, 03_detect_nccl_ib_tc.sh).
    """
    blocks = re.split(r"^NIC\s*:.*$", text, flags=re.MULTILINE)
    return {found for block in blocks if (found := _parse_classes(block)) is not None}


def _parse_classes(block: str) -> tuple[int, int] | None:
    lossless = re.search(r"no-drop priorities\s*:\s*([\d,\s]*)$", block, re.MULTILINE)
    named = [int(word) for word in re.findall(r"\d+", lossless[1] if lossless else "")]
    queues = dict(re.findall(r"^\s*(\d+)\s+(?:DWRR|strict)\s+(\S+)", block, re.MULTILINE | re.IGNORECASE))
    shares = {int(number): int(share) if share.isdecimal() else 0 for number, share in queues.items()}
    data = _find_dscp(block, max(named, key=lambda number: shares.get(number, 0))) if named else None
    if data is None:
        return None
    strict = re.search(r"^\s*(\d+)\s+strict\b", block, re.MULTILINE | re.IGNORECASE)
    control = _find_dscp(block, int(strict[1])) if strict else None
    return CLASS_OF_DSCP * data, CLASS_OF_DSCP * (data if control is None else control)


def _find_dscp(block: str, priority: int) -> int | None:
    """The single DSCP mapped to a priority; None for a range."""
    words = re.findall(rf"DSCP\s*:\s*([\d,\s-]+?)\s*==>\s*priority\s*:\s*{priority}\s*$", block, re.MULTILINE)
    return int(words[0]) if len(words) == 1 and words[0].isdecimal() else None
