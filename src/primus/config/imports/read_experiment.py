"""Read a TOML file of another framework in the place of an experiment file."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from primus.config.imports.foreign_config import ForeignValue
from primus.config.imports.framework_rules import make_tree
from primus.config.imports.read_file import read_foreign_file
from primus.config.imports.write_file import build_experiment
from primus.config.source import Leaf, Tree
from primus.config.text_file import format_path


class ForeignExperiment(NamedTuple):
    """An experiment of another framework as the tree of an experiment file."""

    tree: Tree
    notes: tuple[str, ...]
    """Warnings about what has no key here."""


def read_foreign_experiment(file: Path) -> ForeignExperiment | None:
    """The experiment of a TOML file; None if the file is of another kind.

    Raises:
        UsageError: The model has no preset.
    """
    if file.suffix.lower() != ".toml":
        return None
    shown = format_path(file)
    config = read_foreign_file(file, {})
    parts = build_experiment(config)
    module: Tree = {
        "framework": _make_leaf(config.framework, shown),
        "model": _make_leaf(f"{parts.preset}.yaml" if parts.preset else None, shown),
        "overrides": make_tree(parts.model | parts.settings, shown),
    }
    tree: Tree = {
        "exp_name": _make_leaf(parts.name, shown),
        "workspace": _make_leaf(parts.workspace, shown),
        "modules": {"pre_trainer": module},
    }
    return ForeignExperiment(tree, tuple(f"{shown}: {_format_note(each)}" for each in config.warnings))


def _format_note(other: ForeignValue) -> str:
    return f"{other.key}{'' if other.value is None else f' {other.value}'}: {other.reason}"


def _make_leaf(value: Any, origin: str) -> Leaf:
    return Leaf(value, origin, "" if value is None else str(value))
