"""Check that Transformers can train an experiment; needs no tensor library."""

from __future__ import annotations

import json
from pathlib import Path

from msgspec import structs

from primus.config.exports.hugging_face import format_model_config
from primus.config.schema import Experiment, ModelSpec
from primus.errors import UsageError
from primus.session.checks import check_engine

KEYS = ("moe_z_loss_coeff",)
"""Keys under `overrides:` that are not of the schema; Megatron-LM and native have this one too."""
EXPERT_FAMILIES = ("mixtral", "qwen3_moe")
"""Families with experts whose routers train by native's losses."""


def check(experiment: Experiment) -> None:
    """Accept an experiment that Transformers can train.

    Raises:
        UsageError: It asks for something that is not supported; names the key and the fix.
    """
    trainer = experiment.trainer
    others = {key: value for key, value in trainer.backend_args.items() if key not in KEYS}
    plain = structs.replace(trainer, backend_args=others)
    check_engine(structs.replace(experiment, trainer=plain), Path(__file__).parent)
    if trainer.model.num_experts is not None:
        _check_experts(trainer.model)
    value = trainer.backend_args.get(KEYS[0], 0.0)
    if isinstance(value, bool) or not isinstance(value, int | float) or value < 0:
        raise UsageError(f"{KEYS[0]}: {value} is not a number from 0 on", "such as 1.0e-3")


def _check_experts(model: ModelSpec) -> None:
    """Refuse experts of other families than those whose routers this engine trains."""
    family = json.loads(format_model_config(model).text)["model_type"]
    if family not in EXPERT_FAMILIES:
        problem = f"num_experts: {model.num_experts}: huggingface trains experts of {' and '.join(EXPERT_FAMILIES)}"
        raise UsageError(f"{problem}, not of {family}", "choose another framework")
