"""Write an experiment as a file of another framework."""

from __future__ import annotations

from primus import registry
from primus.config.exports.foreign_text import ForeignText, LostSetting
from primus.config.exports.hugging_face import format_model_config
from primus.config.extended_files import load_model
from primus.config.load import Resolved
from primus.errors import UsageError, did_you_mean
from primus.framework import EXPORTS

MODEL_TARGET = "huggingface"
"""The format that holds a model alone, which belongs to no framework."""


def list_targets() -> dict[str, str]:
    """Usual file of each target: ``{"megatron-lm": "train.sh"}``."""
    plug_ins = [registry.load_plug_in(EXPORTS, name) for name in registry.list_plug_ins(EXPORTS.name)]
    return {each.TARGET: each.FILE_NAME for each in plug_ins} | {MODEL_TARGET: "config.json"}


def format_foreign_file(target: str, resolved: Resolved, preset: str | None) -> ForeignText:
    """The file of `target`, and the settings that it cannot hold.

    Args:
        target: One of `list_targets`.
        resolved: The experiment.
        preset: Name of its model preset; None if the shape was changed.

    Raises:
        UsageError: There is no such target, or the framework has no such model.
    """
    if target == MODEL_TARGET:
        return format_model_config(resolved.experiment.trainer.model)
    for name in registry.list_plug_ins(EXPORTS.name):
        plug_in = registry.load_plug_in(EXPORTS, name)
        if target == plug_in.TARGET:
            return plug_in.format_file(resolved, preset)
    raise UsageError(f"--to {target}: no such format", did_you_mean(target, list(list_targets())))


def find_preset(resolved: Resolved) -> str | None:
    """Name of the preset whose shape the experiment's model has."""
    model = resolved.experiment.trainer.model
    found = [name for name in registry.list_plug_ins("models") if load_model(name) == model]
    return min(found, key=len, default=None)


def describe_lost(lost: list[LostSetting]) -> list[str]:
    """One line for each setting that is lost."""
    return [f"{each.key}: {each.value}: {each.reason}" for each in lost]
