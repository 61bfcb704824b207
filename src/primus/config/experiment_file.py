"""An experiment file as users write it."""

from typing import Any

from msgspec import UNSET, UnsetType, field

from primus.config.schema import ConfigGroup


class ModuleFile(ConfigGroup, frozen=True, kw_only=True):
    """A module as an experiment file writes it."""

    framework: str = "native"
    """Backend that trains: native, ..."""
    config: str | None = None
    """Trainer preset, a name or a path."""
    model: str | None
    """Model preset, a name or a path."""
    overrides: dict[str, Any] = field(default_factory=dict)
    """Values of any trainer or model key, over the presets."""


class ExperimentFile(ConfigGroup, frozen=True, kw_only=True):
    """An experiment file as users write it."""

    work_group: str | UnsetType = UNSET
    """Team that the run belongs to."""
    user_name: str | UnsetType = UNSET
    """Person that the run belongs to."""
    exp_name: str | UnsetType = UNSET
    """Name of the experiment."""
    workspace: str | UnsetType = UNSET
    """Folder that holds all run folders."""
    env: dict[str, str] = field(default_factory=dict)
    """Environment variables of the workers."""
    extends: str | list[str] = field(default_factory=list)
    """Files that this one changes; later ones win over earlier ones."""
    modules: dict[str, ModuleFile]
    """pre_trainer, post_trainer, sft_trainer or rl_trainer."""


TOP_KEYS = ("work_group", "user_name", "exp_name", "workspace")
"""Keys of an experiment itself that a command line can set."""
MODULE_KEYS = ("framework", "config", "model")
"""Keys of a module other than its overrides."""
