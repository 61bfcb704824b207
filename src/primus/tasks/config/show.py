"""Print every resolved value of an experiment and where it was set."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

from primus import experiment
from primus.config.convert import DEFAULT
from primus.config.load import Resolved
from primus.config.schema import GROUPS
from primus.config.source import format_yaml_value
from primus.redaction import redact_tree, redact_value
from primus.task import TaskContext

OVERRIDES = True


class Options(Struct, frozen=True, kw_only=True):
    """Options of `config show`."""

    config: Annotated[str, Meta(extra={"aliases": ("--exp",)})]
    """Experiment file."""
    stage: str | None = None
    """Module to show, such as post_trainer (default: the only one in the file)."""
    changed: bool = False
    """Omit values that equal their defaults."""


def run(options: Options, context: TaskContext) -> None:
    """Print the values, in the groups of the schema.

    Raises:
        UsageError: The experiment is not valid.
    """
    resolved = experiment.resolve_experiment(Path(options.config), context.overrides, context.environ, options.stage)
    sections = {title: _select_values(values, options.changed) for title, values in _build_sections(resolved).items()}
    blocks = [_format_section(title, values) for title, values in sections.items() if values]
    notes = [f"note: {note}" for note in resolved.notes]
    context.result(sections, "\n\n".join([*blocks, *(["\n".join(notes)] if notes else [])]))


class ShownValue(Struct, frozen=True):
    """A setting, and where it comes from."""

    value: Any
    origin: str


Sections = dict[str, dict[str, ShownValue]]
"""Settings by key, by title of their section."""


def _build_sections(resolved: Resolved) -> Sections:
    asked = resolved.experiment
    top = {key: getattr(asked, key) for key in ("work_group", "user_name", "exp_name", "workspace")}
    top |= {f"env.{name}": redact_value(name, value) for name, value in asked.env.items()}
    sections = {"experiment": top | {"framework": asked.trainer.framework}}
    for group in GROUPS:
        sections[group] = redact_tree(msgspec.to_builtins(getattr(asked.trainer, group)))
    sections["backend_args"] = {
        f"backend_args.{key}": experiment.redact_setting(key, value)
        for key, value in asked.trainer.backend_args.items()
    }
    origins = resolved.origins
    return {
        title: {key: ShownValue(value, origins.get(key, DEFAULT)) for key, value in values.items()}
        for title, values in sections.items()
    }


def _select_values(values: dict[str, ShownValue], is_changed_only: bool) -> dict[str, ShownValue]:
    return {key: item for key, item in values.items() if not is_changed_only or item.origin != DEFAULT}


def _format_section(title: str, values: dict[str, ShownValue]) -> str:
    left = {key: f"  {key}: {format_yaml_value(item.value)}" for key, item in values.items()}
    width = min(60, max(map(len, left.values())))
    return "\n".join([f"{title}:", *(f"{left[key]:<{width}}  # {item.origin}" for key, item in values.items())])
