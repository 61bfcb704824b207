"""Settings of `framework: megatron_bridge` alone: the adapters that are trained, and recipes of models."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from primus.config.source import ConfigValue
from primus.session.settings.adapter_settings import AdapterSettings


class BridgeSettings(AdapterSettings, frozen=True, kw_only=True):
    """What is trained, and from which recipe a model comes."""

    recipe: str | None = None
    """Module of Python with a recipe, for a model that transformers does not have."""
    flavor: str | None = None
    """Function of the recipe; its result has the model."""


NAMES = tuple(BridgeSettings.__struct_fields__)


def list_megatron_settings(backend_args: Mapping[str, Any]) -> dict[str, ConfigValue]:
    """The settings of Megatron-Core."""
    return {key: value for key, value in backend_args.items() if key not in NAMES}
