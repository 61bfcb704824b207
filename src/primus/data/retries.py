"""Requests that are sent again where a server is overloaded or asks to wait (429 and 503 with ``Retry-After``)."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Mapping
from datetime import datetime, timezone
from email.utils import parsedate_to_datetime
from typing import Any, TypeVar

TRANSIENT = frozenset({408, 429, 500, 502, 503, 504})
"""Answers after which a server may give another one (RFC 9110, section 15; RFC 6585 for 429)."""

TRIES = 5
FIRST_PAUSE_S = 1.0
"""Before the second try, twice as long before each further one, unless the server says how long."""
LONGEST_WAIT_S = 300.0
"""No longer wait is honoured, and no try begins later than this after the first."""

Result = TypeVar("Result")
Say = Callable[[str], None]


def print_stderr(text: str) -> None:
    """Print a line for people."""
    print(text, file=sys.stderr, flush=True)


def retry_request(server: str, act: Callable[[], Result], say: Say = print_stderr) -> Result:
    """What `act` returns, tried again while it raises an error of an answer that is `TRANSIENT`.

    Args:
        server: Name of the server, for people.
        act: Sends requests that may be repeated.
        say: Receives a line before each wait.

    Raises:
        Exception: What `act` raised last.
    """
    start = time.monotonic()
    for attempt in range(1, TRIES):
        try:
            return act()
        except Exception as error:
            pause = compute_pause(error, attempt)
            if pause is None or time.monotonic() - start + pause > LONGEST_WAIT_S:
                raise
            status = _find_attribute(error, "status_code", "status")
            say(f"{server} answers {status}: trying again in {math.ceil(pause)} s ({attempt + 1} of {TRIES})")
            time.sleep(pause)
    return act()


def compute_pause(error: BaseException, attempt: int) -> float | None:
    """Seconds to wait after an error of the try with this number, from 1; None where another try is of no use."""
    if _find_attribute(error, "status_code", "status") not in TRANSIENT:
        return None
    asked = read_retry_after(error)
    return FIRST_PAUSE_S * 2 ** (attempt - 1) if asked is None else asked


def read_retry_after(error: BaseException) -> float | None:
    """Seconds that the answer which an error is about asks to wait; None where it does not.

    ``Retry-After`` is a number of seconds or a date (RFC 9110, section 10.2.3), which is compared with the server's own
    clock where the answer has it.
    """
    headers = _find_attribute(error, "headers")
    if not isinstance(headers, Mapping):
        return None
    lower = {str(name).lower(): str(value).strip() for name, value in headers.items()}
    value = lower.get("retry-after")
    if not value:
        return None
    if value.isascii() and value.isdigit():
        return float(value)
    until = _parse_date(value)
    now = _parse_date(lower.get("date", "")) or datetime.now(timezone.utc)
    return max(0.0, (until - now).total_seconds()) if until else None


def _parse_date(value: str) -> datetime | None:
    try:
        date = parsedate_to_datetime(value)
    except (TypeError, ValueError):
        return None
    return date if date.tzinfo else date.replace(tzinfo=timezone.utc)


def _find_attribute(error: BaseException, *names: str) -> Any:
    """Of an HTTP library's error: that of its response, or its own, or that of the error that it was made from."""
    at: BaseException | None = error
    while at is not None:
        for owner in (getattr(at, "response", None), at):
            for name in names:
                if (found := getattr(owner, name, None)) is not None:
                    return found
        at = at.__cause__
    return None
