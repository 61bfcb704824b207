"""Write an experiment as a file of another framework."""

from __future__ import annotations

from collections.abc import Callable

from primus.config.exports.foreign_text import ForeignText, LostSetting
from primus.config.exports.hugging_face import format_model_config
from primus.frameworks.maxtext.export_file import format_maxtext
from primus.frameworks.megatron.export_file import format_megatron_script
from primus.frameworks.torchtitan.export_file import format_torchtitan_module
from primus.config.load import Resolved

TARGETS: dict[str, str] = {
    "megatron-lm": "train.sh",
    "torchtitan": "train.py",
    "maxtext": "train.yml",
    "huggingface": "config.json",
}
"""Usual file of each framework."""


def format_foreign_file(target: str, resolved: Resolved, preset: str | None) -> ForeignText:
    """The file of `target`, and the settings that it cannot hold.

    Args:
        target: One of `TARGETS`.
        resolved: The experiment.
        preset: Name of its model preset; None if the shape was changed.

    Raises:
        UsageError: The framework has no such model.
    """
    writers: dict[str, Callable[[], ForeignText]] = {
        "megatron-lm": lambda: format_megatron_script(resolved),
        "torchtitan": lambda: format_torchtitan_module(resolved, preset),
        "maxtext": lambda: format_maxtext(resolved, preset),
        "huggingface": lambda: format_model_config(resolved.experiment.trainer.model),
    }
    return writers[target]()


def find_preset(resolved: Resolved) -> str | None:
    """Name of the preset whose shape the experiment's model has."""
    from primus import registry  # not for targets that do not ask
    from primus.config.load import load_model

    model = resolved.experiment.trainer.model
    found = [name for name in registry.list_plug_ins("models") if load_model(name) == model]
    return min(found, key=len, default=None)


def describe_lost(lost: list[LostSetting]) -> list[str]:
    """One line for each setting that is lost."""
    return [f"{each.key}: {each.value}: {each.reason}" for each in lost]
