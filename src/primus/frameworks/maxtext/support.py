"""Check that MaxText can train an experiment; needs no tensor library."""

from __future__ import annotations

from pathlib import Path

from primus.config.schema import OWNERS, Experiment, ModelSpec, Trainer
from primus.engine_keys import check_key_rules, read_key_rules
from primus.errors import UsageError
from primus.frameworks.maxtext.export_file import FIXED_ROPE
from primus.frameworks.maxtext.settings import MODEL_NAME, check_settings, has_hub_weights, is_built_in, write_model
from primus.session.checks import check_session


def check(experiment: Experiment) -> None:
    """Accept an experiment that MaxText can train.

    Raises:
        UsageError: It asks for something that is not supported; names the key and the fix.
    """
    trainer = experiment.trainer
    rules = read_key_rules(Path(__file__).parent)
    if is_built_in(trainer):
        rules = {key: rule for key, rule in rules.items() if OWNERS[key] != "model"}
    check_key_rules("MaxText", rules, trainer)
    check_settings(trainer)
    write_model(trainer)
    if not is_built_in(trainer):
        _check_rope(trainer.model)
    if trainer.training.init == "primus" and not has_hub_weights(trainer):
        raise UsageError(
            "init: primus: initial weights of primus are supported for Llama, Qwen, Mixtral and Qwen3-MoE only",
            "set init: engine to initialize the weights by MaxText",
        )
    if trainer.checkpoint.load is not None and not has_hub_weights(trainer):
        raise UsageError(
            f"load: {trainer.checkpoint.load}: MaxText gets weights for Llama, Qwen, Mixtral and Qwen3-MoE only",
            "remove it, or choose another framework",
        )
    if trainer.training.device == "cpu":
        _check_numbers_of_cpu(trainer)
    check_session(trainer, "maxtext")


def _check_numbers_of_cpu(trainer: Trainer) -> None:
    """Refuse 8-bit floating point, which JAX only emulates on a CPU."""
    own = trainer.backend_args.get("quantization") or ""
    for key, value, off in (("fp8", trainer.training.fp8, "null"), ("quantization", own, "''")):
        if value and (key == "fp8" or "fp8" in value):
            raise UsageError(
                f"{key}: {value}: MaxText has 8-bit floating point on GPUs only; a CPU emulates it",
                f"set {key}: {off}, or train on GPUs",
            )


def _check_rope(spec: ModelSpec) -> None:
    """Refuse other constants of Llama's rope scaling than MaxText's."""
    if spec.rope_type != "llama3":
        return
    for key, value in FIXED_ROPE.items():
        if getattr(spec, key) != value:
            raise UsageError(
                f"{key}: {getattr(spec, key)}: MaxText scales rope by the constants of Llama 3.1, {key} {value:g}",
                f"set {key}: {value:g}, rope_type: default, or {MODEL_NAME} of a model that MaxText knows",
            )
