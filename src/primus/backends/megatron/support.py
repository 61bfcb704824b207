"""Check that megatron-core can train an experiment; needs no tensor library."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from primus import model_checks
from primus.backends.megatron.backend_settings import check_settings
from primus.backends.megatron.installation import find_transformer_engine, has_transformer_engine
from primus.config.schema import Experiment, ModelSpec, Trainer
from primus.engine_keys import check_key_rules, format_yaml_value, read_key_rules
from primus.errors import UsageError
from primus.session.checks import check_loop, check_session

NAME = "megatron"
FOLDER = Path(__file__).parent


class MegatronProblem(NamedTuple):
    """A combination of values that megatron-core does not train."""

    text: str
    hint: str


def check_experiment(experiment: Experiment) -> None:
    """Accept an experiment that megatron-core can train, as far as the launching machine can know.

    Raises:
        UsageError: A value is not supported; the message names its key and the fix.
    """
    trainer = experiment.trainer
    check_key_rules(NAME, read_key_rules(FOLDER), trainer)
    model_checks.check(trainer.model)
    training, parallel = trainer.training, trainer.parallel
    model_checks.check_parallel(trainer.model, parallel, training.seq_length)
    _raise_first(_find_model_problems(trainer.model))
    _raise_first(_find_layout_problems(trainer))
    # Without Megatron on this machine the workers run elsewhere, perhaps with Transformer Engine: then they check.
    if training.device == "cpu" or find_transformer_engine(os.environ) is False:
        check_local_layers(trainer)
    check_settings(trainer.backend_args)
    check_loop(trainer, NAME)
    check_session(trainer, NAME)


def check_local_layers(trainer: Trainer) -> None:
    """Accept an experiment that needs no Transformer Engine, which has no CPU version.

    Raises:
        UsageError: It needs it; the message names the key.
    """
    for key, value, accepted in _list_transformer_engine_settings(trainer):
        if value != accepted:
            raise UsageError(
                f"{key}: {format_yaml_value(value)}: megatron supports it only with Transformer Engine, which needs a"
                " GPU and is not installed",
                f"set {key}: {format_yaml_value(accepted)}, or train in an image that has Transformer Engine",
            )


def check_process(trainer: Trainer, device_type: str) -> None:
    """Accept an experiment in a worker, where the installation and the device are known.

    Raises:
        UsageError: A value is not supported here; the message names its key.
    """
    if device_type == "cpu" or not has_transformer_engine():
        check_local_layers(trainer)
    elif trainer.data.reset_attention_mask:
        raise UsageError(
            "reset_attention_mask: true: the attention of Transformer Engine takes no mask of documents",
            "set reset_attention_mask: false, or choose another framework",
        )


def _list_transformer_engine_settings(trainer: Trainer) -> Iterator[tuple[str, Any, Any]]:
    """Keys that need Transformer Engine, their values, and the value that does not.

    Sources: megatron/core/transformer/dot_product_attention.py refuses context parallelism and windows; the local
    layers of latent attention do not build (`DotProductAttention.__init__` has no `k_channels`).
    """
    model = trainer.model
    yield "multi_latent_attention", model.multi_latent_attention, False
    yield "window_size", model.window_size, None
    yield "fp8", trainer.training.fp8, None
    yield "context_parallel_size", trainer.parallel.context_parallel_size, 1


def _find_model_problems(spec: ModelSpec) -> Iterator[MegatronProblem]:
    if spec.rope_type == "yarn" and not spec.multi_latent_attention:
        yield MegatronProblem(
            "rope_type: yarn: megatron supports it only with multi_latent_attention",
            "set rope_type: default or llama3, or choose another framework",
        )
    if spec.num_experts is None:
        return
    if spec.moe_router_score_function == "sigmoid" and not spec.moe_router_norm_topk_prob and spec.moe_router_topk > 1:
        yield MegatronProblem(
            "moe_router_norm_topk_prob: false: megatron always renormalises sigmoid scores",
            "set moe_router_norm_topk_prob: true, or choose another framework",
        )


def _find_layout_problems(trainer: Trainer) -> Iterator[MegatronProblem]:
    model, parallel = trainer.model, trainer.parallel
    tensor, pipeline = parallel.tensor_model_parallel_size, parallel.pipeline_model_parallel_size
    if model.vocab_size % tensor:
        reason = "megatron would pad the vocabulary, which changes the loss"
        yield MegatronProblem(
            f"tensor_model_parallel_size: {tensor} does not divide vocab_size {model.vocab_size}: {reason}",
            f"set vocab_size: {-(-model.vocab_size // tensor) * tensor}, or choose another size",
        )
    if model.num_layers % pipeline:
        yield MegatronProblem(
            f"pipeline_model_parallel_size: {pipeline} does not divide num_layers {model.num_layers}",
            "choose a size that divides it",
        )
    if model.num_experts is not None and tensor > 1 and not parallel.sequence_parallel:
        yield MegatronProblem(
            "sequence_parallel: false: megatron trains experts with tensor parallelism only if the sequence is split",
            "set sequence_parallel: true, or tensor_model_parallel_size: 1",
        )


def _raise_first(problems: Iterator[MegatronProblem]) -> None:
    for problem in problems:
        raise UsageError(problem.text, problem.hint)
