"""Read the ``Retry-After`` header of an HTTP response (RFC 9110, section 10.2.3)."""

from __future__ import annotations

from datetime import datetime, timezone
from email.utils import parsedate_to_datetime


def parse_retry_after(value: str | None, date: str | None = None) -> float | None:
    """Seconds until the next attempt; None for a missing or invalid header.

    Args:
        value: The header: a number of seconds, or a date.
        date: ``Date`` of the response, with which a date is compared: the clocks of client and server may differ.
    """
    value = (value or "").strip()
    if value.isascii() and value.isdigit():
        return float(value)
    until, now = _parse_date(value), _parse_date(date or "") or datetime.now(timezone.utc)
    return max(0.0, (until - now).total_seconds()) if until else None


def _parse_date(value: str) -> datetime | None:
    try:
        date = parsedate_to_datetime(value)
    except (TypeError, ValueError):
        return None
    return date if date.tzinfo else date.replace(tzinfo=timezone.utc)
