"""Time limits as hooks declare them."""

from __future__ import annotations

from primus.errors import UsageError


def parse_seconds(text: str, where: str) -> float:
    """A time limit in seconds: `60` or `60s`.

    Raises:
        UsageError: It is not a number above 0; the message begins with `where`.
    """
    try:
        value = float(text.removesuffix("s"))
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise UsageError(f"{where}: {text!r} is not a time limit", "give seconds above 0")
    return value
