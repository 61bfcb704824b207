"""Retry HTTP requests after transient errors; ``Retry-After`` of 429 and 503 responses is honoured."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from primus.messages import Say
from primus.retry_after import parse_retry_after

TRANSIENT = frozenset({408, 429, 500, 502, 503, 504})
"""Status codes after which a retry may succeed (RFC 9110, section 15; RFC 6585 for 429)."""

TRIES = 5
"""Number of attempts; the pauses add up to 15 s, within which an overloaded server usually recovers."""
FIRST_PAUSE_S = 1.0
"""Pause before the second attempt; doubled before each further one unless the response has ``Retry-After``."""
LONGEST_WAIT_S = 300.0
"""Longest ``Retry-After`` that is honoured, and latest start of an attempt after the first one."""

CLIENTS = frozenset({"aiohttp", "botocore", "fsspec", "gcsfs", "httpx", "httpx2", "requests"})
"""Packages whose exceptions are errors of the network."""

Result = TypeVar("Result")


def print_stderr(text: str) -> None:
    """Print a line to standard error."""
    print(text, file=sys.stderr, flush=True)


def retry_request(server: str, act: Callable[[], Result], say: Say = print_stderr) -> Result:
    """Return the result of `act`; call it again while it raises an error with a `TRANSIENT` status code.

    Args:
        server: Name of the server, for messages.
        act: Sends requests. It may be called several times, so the requests must be idempotent.
        say: Receives a line before each wait.

    Raises:
        Exception: The last error of `act`.
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
    return act()  # the last attempt: its error is the caller's


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
    if not isinstance(headers, Mapping):
        return None
    lower = {str(name).lower(): str(value) for name, value in headers.items()}
    return parse_retry_after(lower.get("retry-after"), lower.get("date"))


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
