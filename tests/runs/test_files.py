"""JSON of results and of run folders."""

from __future__ import annotations

import json

from primus.runs.files import MOST_INDENTED, to_json


def test_long_columns_of_numbers_are_one_line_of_json_and_short_ones_are_indented() -> None:
    short = {"loss": [2.5, 2.25]}
    assert to_json(short) == json.dumps(short, indent=2)
    long = {"run": "a", "loss": [step / 7 for step in range(MOST_INDENTED // 10)]}
    text = to_json(long)
    assert "\n" not in text and json.loads(text) == long


def test_a_secret_beside_long_columns_is_masked() -> None:
    text = to_json(
        {"url": "https://ann:hunter2hunter2@host/x", "loss": [step / 7 for step in range(MOST_INDENTED // 10)]}
    )
    assert "hunter2" not in text and "\n" not in text
