"""1 if a completion is the column `answer` of its row, without white space around; else 0."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def reward(prompt: str, completion: str, row: Mapping[str, Any]) -> float:
    """Compare a completion with its answer."""
    return float(completion.strip() == str(row["answer"]).strip())
