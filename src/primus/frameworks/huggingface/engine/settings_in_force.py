"""The settings in force of a run of Transformers, read from its model, its optimizer and its first step."""

from __future__ import annotations

from typing import Any

import torch

from primus.session.settings.settings_in_force import APPLIED_NORM, LiveSetting
from primus.session.settings.torch_settings import (
    StepWatch,
    is_model_compiled,
    is_state_sharded,
    measure_applied_norm,
    read_torch_settings,
)


def read_settings(model: Any, optimizer: torch.optim.Optimizer, watch: StepWatch, world: int) -> list[LiveSetting]:
    """The settings that a model of Transformers and its optimizer have after the step that `watch` saw."""
    own: dict[str, object] = {
        "attention": str(model.config._attn_implementation),
        "compile": is_model_compiled(model),
        APPLIED_NORM: measure_applied_norm([optimizer]),
    }
    if world > 1:  # else there is nothing to shard
        own["use_distributed_optimizer"] = is_state_sharded(model)
    found = read_torch_settings(model, [optimizer], watch)
    return [*found, *(LiveSetting(key=key, value=value) for key, value in own.items())]
