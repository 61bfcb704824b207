"""A patch of an experiment file that changes settings."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping

ENV = "env."


def format_experiment_patch(name: str, text: str, settings: Mapping[str, str]) -> str:
    """A unified diff that sets `settings` under the `overrides:` of an experiment file; comments stay.

    Args:
        name: Path of the file.
        text: Its content.
        settings: Values by key; `env.NAME` is set under `env:` at the top level, which is added if needed.

    Returns:
        The diff; empty if the file has no `overrides:` block.
    """
    lines = text.splitlines()
    changed = list(lines)
    for key, value in settings.items():
        if key.startswith(ENV):
            if _find_block(changed, "env", 0) is None:
                changed += ["env:"]
            changed = _set_value(changed, "env", 0, key.removeprefix(ENV), value)
        elif _find_block(changed, "overrides") is None:
            return ""
        else:
            changed = _set_value(changed, "overrides", None, key, value)
    diff = difflib.unified_diff(lines, changed, f"a/{name}", f"b/{name}", lineterm="")
    return "".join(f"{line}\n" for line in diff)


def _find_block(lines: list[str], header: str, depth: int | None = None) -> int | None:
    """Line of a header that begins a block; at `depth` if it is given."""
    for number, line in enumerate(lines):
        if re.fullmatch(rf"\s*{header}:\s*(#.*)?", line) and depth in (None, _count_indent(line)):
            return number
    return None


def _set_value(lines: list[str], header: str, depth: int | None, key: str, value: str) -> list[str]:
    """The lines with `key: value` in the block of `header`; a new key becomes its first line."""
    start = _find_block(lines, header, depth)
    assert start is not None
    outer = _count_indent(lines[start])
    inside = [i for i in range(start + 1, len(lines)) if lines[i].strip() and not lines[i].lstrip().startswith("#")]
    end = next((i for i in inside if _count_indent(lines[i]) <= outer), len(lines))
    inside = [i for i in inside if i < end]
    indent = " " * (_count_indent(lines[inside[0]]) if inside else outer + 2)
    pattern = re.compile(rf"({indent}{re.escape(key)}:\s*)([^#]*?)(\s*(?:#.*)?)")
    for place in inside:
        found = pattern.fullmatch(lines[place])
        if found:
            return [*lines[:place], f"{found[1]}{value}{found[3]}", *lines[place + 1 :]]
    return [*lines[: start + 1], f"{indent}{key}: {value}", *lines[start + 1 :]]


def _count_indent(line: str) -> int:
    return len(line) - len(line.lstrip(" "))
