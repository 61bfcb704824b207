"""A patch of an experiment file that changes settings."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping


def format_experiment_patch(name: str, text: str, settings: Mapping[str, str]) -> str:
    """A unified diff that sets `settings` under the `overrides:` of an experiment file; comments stay.

    Args:
        name: Path of the file.
        text: Its content.
        settings: Values by key.
    """
    lines = text.splitlines(keepends=True)
    start = next((i for i, line in enumerate(lines) if re.match(r"\s*overrides:\s*(#.*)?$", line)), None)
    if start is None:
        return ""
    depth = _count_indent(lines[start])
    inside = [i for i in range(start + 1, len(lines)) if lines[i].strip() and not lines[i].lstrip().startswith("#")]
    end = next((i for i in inside if _count_indent(lines[i]) <= depth), len(lines))
    inside = [i for i in inside if i < end]
    indent = " " * (_count_indent(lines[inside[0]]) if inside else depth + 2)
    changed, added = list(lines), []
    for key, value in settings.items():
        pattern = re.compile(rf"({indent}{re.escape(key)}:\s*)([^#\n]*?)(\s*(?:#.*)?\n?)$")
        place, found = next(((i, match) for i in inside if (match := pattern.fullmatch(lines[i]))), (0, None))
        if found is None:
            added.append(f"{indent}{key}: {value}\n")
        else:
            changed[place] = f"{found[1]}{value}{found[3]}"
    changed[start + 1 : start + 1] = added
    return "".join(difflib.unified_diff(lines, changed, f"a/{name}", f"b/{name}"))


def _count_indent(line: str) -> int:
    return len(line) - len(line.lstrip(" "))
