"""Check that Megatron-Bridge can train an experiment; needs no tensor library."""

from __future__ import annotations

from pathlib import Path

from primus.config.exports.hugging_face import format_model_config
from primus.config.schema import Experiment, Trainer
from primus.config.source import format_yaml_value
from primus.engine_keys import check_key_rules, read_key_rules
from primus.errors import UsageError
from primus.frameworks.megatron.backend_settings import check_setting_names
from primus.frameworks.megatron_bridge.settings import BridgeSettings, list_megatron_settings
from primus.models import model_checks
from primus.session.checks import check_session
from primus.session.settings.adapter_settings import check_targets, read_settings

NAME = "megatron_bridge"
FOLDER = Path(__file__).parent
LOCAL_ONLY = (("fp8", "training"), ("context_parallel_size", "parallel"), ("window_size", "model"))
"""Keys that need Transformer Engine, which has no CPU version, and their groups."""


def check(experiment: Experiment) -> None:
    """Accept an experiment that Megatron-Bridge can train, as far as the launching machine can know.

    Raises:
        UsageError: A value is not supported; the message names its key and the fix.
    """
    trainer = experiment.trainer
    settings = read_settings(trainer.backend_args, BridgeSettings)
    check_key_rules(NAME, read_key_rules(FOLDER), trainer)
    model_checks.check(trainer.model)
    _check_model(trainer, settings)
    _check_adapters(trainer, settings)
    _check_layout(trainer)
    check_setting_names(list_megatron_settings(trainer.backend_args))
    check_session(trainer, NAME)
    if trainer.training.device == "cpu":
        check_local_layers(trainer)


def check_local_layers(trainer: Trainer) -> None:
    """Accept an experiment that needs no Transformer Engine.

    Raises:
        UsageError: It needs it; the message names the key.
    """
    for key, group in LOCAL_ONLY:
        value = getattr(getattr(trainer, group), key)
        if value not in (None, 1):
            raise UsageError(
                f"{key}: {format_yaml_value(value)}: {NAME} supports it only with Transformer Engine, which needs a"
                " GPU",
                f"remove {key}, or train in an image that has Transformer Engine",
            )
    if trainer.backend_args.get("fp4"):
        raise UsageError(f"fp4: {NAME} supports it only with Transformer Engine, which needs a GPU", "remove fp4")
    if trainer.model.multi_latent_attention:
        raise UsageError(
            f"multi_latent_attention: true: {NAME} supports it only with Transformer Engine, which needs a GPU",
            "train in an image that has Transformer Engine, or choose another model",
        )


def _check_model(trainer: Trainer, settings: BridgeSettings) -> None:
    """The model is one of transformers, or comes from a recipe."""
    if (settings.recipe is None) != (settings.flavor is None):
        raise UsageError("recipe and flavor belong together: a module and its function", "set both, or none")
    if settings.recipe is None:
        format_model_config(trainer.model)


def _check_adapters(trainer: Trainer, settings: BridgeSettings) -> None:
    check_targets(settings, allows_other_names=trainer.model.num_experts is not None)
    if settings.peft_rslora:
        raise UsageError("peft_rslora: Megatron-Bridge divides by the rank", "set peft_alpha times sqrt(peft_dim)")
    if settings.peft != "none" and trainer.training.init == "engine" and trainer.checkpoint.load is None:
        raise UsageError(
            f"peft: {settings.peft}: adapters need a model whose weights can be restored",
            "set load: hf:NAME, or init: primus",
        )


def _check_layout(trainer: Trainer) -> None:
    parallel = trainer.parallel
    if trainer.data.packed_sequence and parallel.pipeline_model_parallel_size > 1:
        raise UsageError(
            "packed_sequence: true is not supported with pipeline parallelism", "set pipeline_model_parallel_size: 1"
        )
    if trainer.data.packed_sequence and parallel.context_parallel_size > 1:
        raise UsageError(
            "packed_sequence: true is not supported with context parallelism", "set context_parallel_size: 1"
        )
