"""A reward for short completions: 1 for none, 0 from 200 characters on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

LONGEST = 200


def reward(prompt: str, completion: str, row: Mapping[str, Any]) -> float:
    """Count characters; a row may have its own limit in a column `longest`."""
    return max(0.0, 1.0 - len(completion) / int(row.get("longest", LONGEST)))
