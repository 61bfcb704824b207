"""When a request is sent again: the pauses of every HTTP client, and ``Retry-After`` (RFC 9110, section 10.2.3)."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Mapping
from datetime import datetime, timezone
from email.utils import parsedate_to_datetime
from itertools import count
from typing import Any, TypeVar

from primus.messages import Say

TRANSIENT = frozenset({408, 429, 500, 502, 503, 504})
"""Status codes after which a retry may succeed (RFC 9110, section 15; RFC 6585 for 429)."""

TRIES = 5
"""Attempts of a download; the pauses add up to 15 s, within which an overloaded server usually recovers."""
FIRST_PAUSE_S = 1.0
"""Pause before its second attempt; doubled before each further one unless the response has ``Retry-After``."""
LONGEST_WAIT_S = 300.0
"""Longest ``Retry-After`` that a download honours, and latest start of an attempt after the first one."""

CLUSTER_PAUSES_S = (0.5, 1.0, 2.0, 4.0)
"""Pauses between the attempts of a request to a cluster's server, for which a user waits."""
LONGEST_CLUSTER_PAUSE_S = 30.0
"""Maximum of such a pause that the server requests (Retry-After)."""

CLIENTS = frozenset({"aiohttp", "botocore", "fsspec", "gcsfs", "httpx", "httpx2", "requests"})
"""Packages whose exceptions are errors of the network."""

Result = TypeVar("Result")


def print_stderr(text: str) -> None:
    """Print a line to standard error."""
    print(text, file=sys.stderr, flush=True)


def repeat_request(act: Callable[[], Result], choose_pause: Callable[[Exception, int], float | None]) -> Result:
    """Return the result of `act`; call it again while `choose_pause` allows it.

    Args:
        act: Sends requests. It may be called several times, so the requests must be idempotent.
        choose_pause: Gives the seconds until the next attempt, from the error and the number of the attempt that
            failed (from 1); None if the error is final.

    Raises:
        Exception: The last error of `act`.
    """
    for attempt in count(1):
        try:
            return act()
        except Exception as error:
            pause = choose_pause(error, attempt)
            if pause is None:
                raise
            time.sleep(pause)
    raise AssertionError


def repeat_download(server: str, act: Callable[[], Result], say: Say = print_stderr) -> Result:
    """Return the result of `act`; call it again while it raises an error with a `TRANSIENT` status code.

    Args:
        server: Name of the server, for messages.
        act: Sends requests.
        say: Receives a line before each wait.

    Raises:
        Exception: The last error of `act`.
    """
    start = time.monotonic()

    def choose_pause(error: Exception, attempt: int) -> float | None:
        pause = compute_pause(error, attempt)
        if attempt == TRIES or pause is None or time.monotonic() - start + pause > LONGEST_WAIT_S:
            return None
        status = _find_attribute(error, "status_code", "status")
        say(f"{server} answers {status}: trying again in {math.ceil(pause)} s ({attempt + 1} of {TRIES})")
        return pause

    return repeat_request(act, choose_pause)


def choose_cluster_pause(attempt: int, asked_s: float | None) -> float | None:
    """Seconds until the next request to a cluster's server; None after the last attempt.

    Args:
        attempt: Number of the attempt that failed, from 1.
        asked_s: ``Retry-After`` of the response.
    """
    if attempt > len(CLUSTER_PAUSES_S):
        return None
    return CLUSTER_PAUSES_S[attempt - 1] if asked_s is None else min(asked_s, LONGEST_CLUSTER_PAUSE_S)


def compute_pause(error: BaseException, attempt: int) -> float | None:
    """Pause in seconds after a failure of attempt number `attempt` (from 1); None if the error is not transient."""
    if _find_attribute(error, "status_code", "status") not in TRANSIENT:
        return None
    asked = read_retry_after(error)
    return FIRST_PAUSE_S * 2 ** (attempt - 1) if asked is None else asked


def is_client_error(error: BaseException) -> bool:
    """Whether an HTTP client raised the error; each has its own types."""
    return type(error).__module__.split(".")[0] in CLIENTS


def read_retry_after(error: BaseException) -> float | None:
    """Value of ``Retry-After`` in the response of an error, in seconds; None if the response has none."""
    headers = _find_attribute(error, "headers")
    return parse_retry_after(headers) if isinstance(headers, Mapping) else None


def parse_retry_after(headers: Mapping[str, str]) -> float | None:
    """Seconds until the next attempt, by the headers of a response; None if ``Retry-After`` is missing or invalid.

    A date is compared with ``Date`` of the response, because the clocks of client and server may differ.
    """
    lower = {str(name).lower(): str(value) for name, value in headers.items()}
    value = lower.get("retry-after", "").strip()
    if value.isascii() and value.isdigit():
        return float(value)
    until, now = _parse_date(value), _parse_date(lower.get("date", "")) or datetime.now(timezone.utc)
    return max(0.0, (until - now).total_seconds()) if until else None


def _parse_date(value: str) -> datetime | None:
    try:
        date = parsedate_to_datetime(value)
    except (TypeError, ValueError):
        return None
    return date if date.tzinfo else date.replace(tzinfo=timezone.utc)


def _find_attribute(error: BaseException, *names: str) -> Any:
    """First attribute of these names on an HTTP error's response, on the error, or on the error that caused it."""
    at: BaseException | None = error
    while at is not None:
        for owner in (getattr(at, "response", None), at):
            for name in names:
                if (found := getattr(owner, name, None)) is not None:
                    return found
        at = at.__cause__
    return None
