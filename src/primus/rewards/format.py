"""1 if the whole completion, without white space around, matches the regular expression `reward_pattern`; else 0."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any


def reward(prompt: str, completion: str, row: Mapping[str, Any]) -> float:
    """Match a completion; a column `reward_pattern` of a row precedes that of the experiment."""
    return float(re.fullmatch(row["reward_pattern"], completion.strip(), re.DOTALL) is not None)
