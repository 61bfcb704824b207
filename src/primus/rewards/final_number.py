"""1 if the last number in a completion is the last number of the column `answer` of its row (GSM8K); else 0."""

from __future__ import annotations

import re
from collections.abc import Mapping
from decimal import Decimal
from typing import Any

NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")


def reward(prompt: str, completion: str, row: Mapping[str, Any]) -> float:
    """Compare the last numbers of a completion and its answer, as numbers: 1,000 is 1000.0."""
    found, expected = (NUMBER.findall(text) for text in (completion, str(row["answer"])))
    if not expected:
        raise ValueError(f"the answer has no number: {row['answer']}")
    return float(bool(found) and _read_number(found[-1]) == _read_number(expected[-1]))


def _read_number(text: str) -> Decimal:
    return Decimal(text.replace(",", ""))
