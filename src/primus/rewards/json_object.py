"""1 if a completion is a JSON object with the keys of the row's `answer`, if that is an object; else 0."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any


def reward(prompt: str, completion: str, row: Mapping[str, Any]) -> float:
    """Parse a completion."""
    try:
        found = json.loads(completion)
    except (ValueError, RecursionError):
        return 0.0
    expected = row.get("answer")
    keys = expected.keys() if isinstance(expected, Mapping) else ()
    return float(isinstance(found, dict) and found.keys() >= set(keys))
