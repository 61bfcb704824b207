"""Megatron-LM's patterns of layers with experts: ``([0]*3+[1]*58)*1``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import ast

LONGEST_PATTERN = 10_000
"""More layers than any model has; bounds the memory of what a file says."""


def parse_layer_pattern(written: Any) -> int | list[int] | None:
    """A number, or a list with 1 for each layer with experts and 0 for each other; None if it is neither.

    Only integers, lists, sums and multiples are evaluated (Megatron-LM `moe_freq_type` evaluates any Python).
    """
    if isinstance(written, int):
        return written
    import ast  # not for files without such a text

    try:
        value = _evaluate_pattern(ast.parse(str(written).strip(), mode="eval").body)
    except (SyntaxError, ValueError, RecursionError):
        return None
    is_list = isinstance(value, list) and bool(value) and all(item in (0, 1) for item in value)
    return value if isinstance(value, int) or is_list else None


def _evaluate_pattern(node: ast.expr) -> Any:
    import ast

    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    if isinstance(node, ast.List):
        return [_evaluate_pattern(item) for item in node.elts]
    if isinstance(node, ast.BinOp):
        left, right = _evaluate_pattern(node.left), _evaluate_pattern(node.right)
        if isinstance(node.op, ast.Add) and isinstance(left, list) and isinstance(right, list):
            return left + right
        if isinstance(node.op, ast.Mult) and {type(left), type(right)} == {list, int}:
            items, times = (left, right) if isinstance(left, list) else (right, left)
            if len(items) * times <= LONGEST_PATTERN:
                return items * times
    raise ValueError("not a pattern")
