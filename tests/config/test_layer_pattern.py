"""Patterns of layers with experts, as Megatron-LM writes them."""

from __future__ import annotations

import pytest

from primus.config.layer_pattern import LONGEST_PATTERN, parse_layer_pattern


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        (2, 2),
        ("2", 2),
        ("([0]*3+[1]*5)*1", [0, 0, 0, 1, 1, 1, 1, 1]),
        (" 2*[0, 1] ", [0, 1, 0, 1]),
        (f"[1]*{LONGEST_PATTERN}", [1] * LONGEST_PATTERN),
        (f"[1]*{LONGEST_PATTERN + 1}", None),
        ("[]", None),
        ("[0, 2]", None),
        ("[True, False]", None),
        ("True", None),
        ("1+1", None),
        ("[1]*[1]", None),
        ("[1]*n", None),
        ("[1", None),
    ],
)
def test_a_pattern_holds_sums_and_multiples_of_lists_of_zeros_and_ones(written: object, expected: object) -> None:
    assert parse_layer_pattern(written) == expected
