"""Settings of `framework: megatron_bridge` alone: the adapters that are trained, and recipes of models."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from primus.errors import UsageError

ADAPTERS = ("lora", "dora")
TARGETS = ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2")
"""Matrices of a layer that get adapters (megatron/bridge/peft/lora.py)."""


class BridgeSettings(Struct, frozen=True, kw_only=True):
    """What is trained, and from which recipe a model comes."""

    peft: Literal["none", "lora", "dora"] = "none"
    """Train adapters and keep the weights of the model; none trains all weights."""
    peft_dim: Annotated[int, Meta(ge=1)] = 32
    """Rank of the adapters."""
    peft_alpha: Annotated[int, Meta(ge=1)] = 32
    """Scale of the adapters, divided by peft_dim."""
    peft_dropout: Annotated[float, Meta(ge=0, lt=1)] = 0.0
    """Share of the inputs of adapters that is dropped."""
    peft_target_modules: tuple[str, ...] = TARGETS
    """Matrices that get adapters; patterns with * choose layers."""
    recipe: str | None = None
    """Module of Python with a recipe, for a model that transformers does not have."""
    flavor: str | None = None
    """Function of the recipe; its result has the model."""


NAMES = tuple(BridgeSettings.__struct_fields__)


def read_settings(backend_args: Mapping[str, Any]) -> BridgeSettings:
    """The settings in `backend_args`; others there are Megatron's.

    Raises:
        UsageError: A value is not valid; names the key.
    """
    own = {key: value for key, value in backend_args.items() if key in NAMES and value is not None}
    for key, value in own.items():
        try:
            msgspec.convert({key: value}, BridgeSettings)
        except msgspec.ValidationError as error:
            reason = str(error).partition(" - at ")[0]
            raise UsageError(f"{key}: {value}: {reason}", "docs/engine-megatron-bridge.md lists the settings") from None
    return msgspec.convert(own, BridgeSettings)


def list_megatron_settings(backend_args: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of Megatron-Core."""
    return {key: value for key, value in backend_args.items() if key not in NAMES}
