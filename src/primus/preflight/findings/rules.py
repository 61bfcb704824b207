"""The table of findings, and the function that judges a reading by a row of it."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from msgspec import Struct

from primus.config.source import read_package_yaml
from primus.preflight.findings.finding import CheckFinding, Status
from primus.preflight.findings.thresholds import Thresholds
from primus.report import table

GIB = 1 << 30
COMPARISONS: dict[str, Callable[[Any, Any], bool]] = {"<": operator.lt, "<=": operator.le, ">=": operator.ge}


class FindingRule(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A row of `rules/<group>.yaml`. Its key is the name of the check, then ``/`` and the case if there are several;
    a case has the fields of the check's own row, unless it states them. Texts have placeholders: ``{text}``."""

    reading: str = ""
    """Attribute that `judge_readings` reads; default: the name of the check without its group."""
    limit: str = ""
    """Operator, field of `Thresholds`, and unit: ``< temperature_c C``. ``= None`` compares the reading as text. If
    there is no limit, the reading itself says whether it is good."""
    measured: str = "{text}"
    bad: str = ""
    """What is measured if the reading is not good; default: `measured`."""
    expected: str = ""
    """Default: the limit, or the word `wanted` of the caller."""
    why: str = ""
    source: str = ""
    """Public source of the limit or of the reason."""
    status: Status = "fail"
    """Status of a reading that is not good."""
    advice: str = ""


class About(NamedTuple):
    """What a finding concerns: a part of a node, a node, or both; the whole node by default."""

    subject: str = ""
    host: str = ""


NODE = About()


@functools.cache
def load_rules() -> dict[str, FindingRule]:
    """All rows by key."""
    rows: dict[str, dict[str, str]] = {}
    for file in sorted((Path(__file__).parent / "rules").glob("*.yaml")):
        rows |= read_package_yaml(file, dict[str, dict[str, str]])
    complete = {key: rows.get(key.partition("/")[0], {}) | row for key, row in rows.items()}
    return msgspec.convert(complete, dict[str, FindingRule])


def judge(row: str, reading: object, text: str = "", about: About = NODE, /, **words: Any) -> CheckFinding:
    """The finding for a reading: ok, or the status and the advice of the row.

    Args:
        text: What was measured, as a text.
        words: Values of the placeholders; and `limits`, the thresholds; `check` and `status`, instead of those of the
            row; `value`, the number that nodes compare, instead of the reading.
    """
    rule, is_number = load_rules()[row], isinstance(reading, (int, float)) and not isinstance(reading, bool)
    is_good, value, words["limit"] = bool(reading), words.get("value"), ""
    if rule.limit:
        sign, name, *unit = rule.limit.split()
        limit = getattr(words.get("limits") or Thresholds(), name, name)
        scale = GIB if unit == ["GiB"] else 1
        is_good = COMPARISONS[sign](reading / scale, limit) if sign in COMPARISONS else str(reading) == limit  # type: ignore[operator]
        words["limit"] = " ".join([sign, _format_value(limit), *unit]) if sign in COMPARISONS else limit
        text = text or (table.format_size(reading) if scale > 1 else " ".join([_format_value(reading), *unit]))  # type: ignore[arg-type]
        value = reading if value is None and is_number else value
    words["text"] = text
    reason = f"{rule.why.format(**words)} ({rule.source})" if rule.source else rule.why.format(**words)
    return CheckFinding(
        check=words.get("check") or row.partition("/")[0],
        subject=about.subject,
        status="ok" if is_good else words.get("status", rule.status),
        measured=(rule.measured if is_good or not rule.bad else rule.bad).format(**words),
        expected=rule.expected.format(**words) or words["limit"] or str(words.get("wanted", "")),
        reason=reason.strip(),
        advice="" if is_good else rule.advice.format(**words),
        value=value,
        host=about.host,
    )


def judge_readings(values: object, rows: Iterable[str], about: About, **words: Any) -> Iterator[CheckFinding]:
    """Findings of the rows whose reading is an attribute of `values` and known."""
    for row in rows:
        reading = getattr(values, load_rules()[row].reading or row.partition("/")[0].partition(".")[2])
        if reading is not None:
            yield judge(row, reading, "", about, **words)


def report_info(
    check: str, measured: str, reason: str = "", about: About = NODE, *, value: float | None = None
) -> CheckFinding:
    """A measured value without an expectation."""
    return CheckFinding(
        check=check,
        status="info",
        measured=measured,
        reason=reason,
        value=value,
        subject=about.subject,
        host=about.host,
    )


def _format_value(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)
