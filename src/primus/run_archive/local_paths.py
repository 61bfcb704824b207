"""Paths of one machine as names that another machine can replace: `<home>`, `<workspace>`, `<checkout>`."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from primus.package_files import CHECKOUT
from primus.runs.store import Run

CHECKOUT_PLACE = {"<checkout>": str(CHECKOUT)} if CHECKOUT else {}
"""The folder of the checkout, if primus has one."""
IMPORTED_DATA = "<data>"
"""The data of an archive, where it was imported."""


def list_places(
    run: Run, working_folder: Path, environ: Mapping[str, str], environment: str = sys.prefix
) -> dict[str, str]:
    """The folders of this machine by the name that an archive gives to them."""
    directory = run.directory.resolve()
    return {
        "<run>": str(directory),
        "<workspace>": str(directory.parents[1]),
        "<folder>": str(working_folder),
        "<environment>": environment,
        **CHECKOUT_PLACE,
        "<home>": environ.get("HOME") or os.path.expanduser("~"),
    }


class PathNames:
    """Replaces the folders of this machine in texts by names."""

    def __init__(self, places: Mapping[str, str]) -> None:
        self._names: dict[str, str] = {}
        for name, place in places.items():
            for path in (place, os.path.realpath(place)):
                if path.count("/") and path != "/":
                    self._names.setdefault(path, name)
                    self._names.setdefault(json.dumps(path)[1:-1], name)
        # The longest first: a workspace may lie below the home folder.
        paths = "|".join(map(re.escape, sorted(self._names, key=len, reverse=True)))
        # Whole components only: /root is not in /mnt/root, /root2 or /root.bak.
        self._pattern = re.compile(rf"(?<![\w.~-])(?:{paths})(?![\w-]|\.\w)")

    def replace(self, text: str) -> str:
        """`text` with names instead of folders."""
        return self._pattern.sub(lambda found: self._names[found[0]], text)


def restore_paths(value: Any, places: Mapping[str, str]) -> Any:
    """`value`, a tree of JSON or YAML, with the folders of this machine instead of names."""
    if isinstance(value, str):
        for name, place in places.items():
            value = value.replace(name, place)
        return value
    if isinstance(value, dict):
        return {key: restore_paths(item, places) for key, item in value.items()}
    return [restore_paths(item, places) for item in value] if isinstance(value, list) else value
