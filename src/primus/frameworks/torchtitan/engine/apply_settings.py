"""Put settings of `backend_args` into torchtitan's configuration tree."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from torchtitan.distributed.activation_checkpoint import FullAC, MemoryBudgetAC, SelectiveAC
from torchtitan.trainer import Trainer as TitanTrainer

from primus.config.source import flatten_settings
from primus.errors import UsageError
from primus.frameworks.torchtitan.backend_settings import MODE, check_settings

ACTIVATION = "activation_checkpoint."
POLICIES: dict[str, type[FullAC | SelectiveAC | MemoryBudgetAC]] = {
    "full": FullAC,
    "selective": SelectiveAC,
    "memory_budget": MemoryBudgetAC,
}


def apply_settings(config: TitanTrainer.Config, settings: Mapping[str, Any]) -> None:
    """Set fields by path, and let torchtitan validate the tree.

    Raises:
        UsageError: A field does not exist or does not fit.
    """
    check_settings(settings)
    flat = flatten_settings(settings)
    activation = {path: value for path, value in flat.items() if path.startswith(ACTIVATION)}
    if activation:
        config.activation_checkpoint = _choose_policy(config.activation_checkpoint, activation)
    changed = [_set_field(config, path, value) for path, value in flat.items() if path not in activation]
    try:
        for group in (*changed, config):
            validate = getattr(group, "__post_init__", None)
            if validate is not None:
                validate()
    except (ValueError, AssertionError) as error:
        raise UsageError(f"backend_args: torchtitan refuses the configuration: {error}") from error


def _set_field(config: Any, path: str, value: Any) -> Any:
    """Set one field; returns the group that has it."""
    *groups, name = path.split(".")
    for group in groups:
        config = getattr(config, group)
    setattr(config, name, float(value) if isinstance(getattr(config, name), float) else value)
    return config


def _choose_policy(present: Any, settings: Mapping[str, Any]) -> Any:
    """The policy of `mode`, or of the experiment's recompute_activations, with the fields that are set."""
    fields = {path.removeprefix(ACTIVATION): value for path, value in settings.items() if path != MODE}
    mode = settings.get(MODE)
    if mode == "none":
        return None
    policy = POLICIES[mode].Config if mode else type(present)
    known = {field.name for field in dataclasses.fields(policy)} if present is not None or mode else set()
    for name in fields:
        if name not in known:
            raise UsageError(
                f"backend_args: {ACTIVATION}{name}: the chosen policy has no such field",
                f"set {MODE} to the policy that has it",
            )
    return policy(**fields)
