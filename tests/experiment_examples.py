"""The experiment files of examples/; its other YAML files are matrices of `compare run`."""

from __future__ import annotations

from pathlib import Path

EXPERIMENTS = [
    path
    for path in sorted((Path(__file__).parents[1] / "examples").glob("*.yaml"))
    if "\nmodules:" in path.read_text(encoding="utf-8")
]
