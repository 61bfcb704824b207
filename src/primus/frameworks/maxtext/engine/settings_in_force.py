"""The settings in force of a run of MaxText, read from its configuration after its own validation, arrays and mesh."""

from __future__ import annotations

import math
from typing import Any

import jax
from flax import nnx

from primus.config.schema import Trainer
from primus.session.settings.settings_in_force import LiveSetting, explain_settings

DERIVED = (-1, "")
"""Values by which a setting of MaxText's base.yml follows from others."""


def read_settings(config: Any, state: Any, mesh_sizes: dict[str, int], trainer: Trainer) -> list[LiveSetting]:
    """The settings that the objects of MaxText have after the first step.

    Args:
        config: MaxText's configuration, which its model, its optimizer and its step have read.
        state: Of the training.
        mesh_sizes: Devices along each axis of the mesh.
        trainer: What the experiment asks for.
    """
    parameters = jax.tree.leaves(nnx.filter_state(state.model, nnx.Param))
    found = {
        "parameters": sum(math.prod(each.shape) for each in parameters),
        "parameter_dtype": ", ".join(sorted({str(each.dtype) for each in parameters})),
        "bf16": "bfloat16" in str(config.dtype).lower(),
        "attention": config.attention,
        "decoder_block": config.decoder_block.value,
        "recompute_activations": config.remat_policy == "full",
        "optimizer": str(getattr(config.opt_type, "value", config.opt_type)),
        "weight_decay": config.adam_weight_decay,
        "adam_beta1": config.adam_b1,
        "adam_beta2": config.adam_b2,
        "adam_eps": config.adam_eps,
        "clip_grad": config.gradient_clipping_threshold,
        "sharding": " x ".join(f"{axis}={size}" for axis, size in mesh_sizes.items() if size > 1),
        "compile": True,
        **{name: _simplify(getattr(config, name)) for name in trainer.backend_args},
    }
    live = [LiveSetting(key=key, value=value) for key, value in found.items()]
    reasons = {name: "MaxText derives it" for name, asked in trainer.backend_args.items() if asked in DERIVED}
    if "remat_policy" in trainer.backend_args:
        reasons["recompute_activations"] = f"remat_policy: {config.remat_policy}"
    if config.hardware == "cpu":
        reasons["attention"] = "CPUs lack the kernel"
    return explain_settings(live, reasons)


def _simplify(value: Any) -> Any:
    """A value of MaxText's configuration as it is written in YAML."""
    value = getattr(value, "value", value)
    return [_simplify(each) for each in value] if isinstance(value, tuple | list) else value
