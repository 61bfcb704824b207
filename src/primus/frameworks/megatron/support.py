"""Check that megatron-core can train an experiment; needs no tensor library."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from msgspec import Struct

from primus.config.schema import DataConfig, Experiment, ModelSpec, Trainer
from primus.config.source import format_yaml_value
from primus.engine_keys import check_key_rules, read_key_rules
from primus.errors import UsageError
from primus.frameworks.megatron.backend_settings import check_setting_effects, check_setting_names
from primus.frameworks.megatron.known_keys import CHECKOUT_KEYS
from primus.models import model_checks
from primus.session.checks import check_session
from primus.session.settings.number_formats import check_number_format

NAME = "megatron"
FOLDER = Path(__file__).parent


class MegatronDriver(Struct, frozen=True, kw_only=True):
    """What builds the model and the optimizer."""

    version: str
    """Of megatron-core."""
    checkout: str | None
    """Folder of the checkout of Megatron-LM; None for megatron-core alone."""
    uses_transformer_engine: bool

    def format_choice(self) -> str:
        """The choice in one line."""
        if self.checkout is not None:
            return f"Megatron-LM with megatron-core {self.version} of {self.checkout}, driven step by step"
        layers = "the layers of Transformer Engine" if self.uses_transformer_engine else "its own layers"
        return f"megatron-core {self.version}, driven step by step, with {layers}"


class MegatronProblem(NamedTuple):
    """A combination of values that megatron-core does not train."""

    text: str
    hint: str


def check(experiment: Experiment) -> None:
    """Accept an experiment that Megatron can train, as far as the launching machine can know.

    The workers may have more than megatron-core: Transformer Engine, or a checkout of Megatron-LM. They check the rest,
    `check_core`, when they start; here only an experiment for CPUs is checked completely, and of the others what no
    worker trains.

    Raises:
        UsageError: A value is not supported; the message names its key and the fix.
    """
    trainer = experiment.trainer
    _check_keys(trainer, has_checkout=trainer.training.device != "cpu")
    model_checks.check(trainer.model)
    check_engine_data(trainer.data)
    check_setting_names(trainer.backend_args)
    check_session(trainer, NAME)
    if trainer.training.device == "cpu":
        check_core(trainer, has_engine_layers=False)


def check_engine_data(data: DataConfig) -> None:
    """Accept `dataloader: engine` where GPTDataset can read what the experiment names.

    Raises:
        UsageError: A setting makes samples that are in no token file.
    """
    if data.dataloader == "primus":
        return
    for key, value in (("mock_data", data.mock_data), ("fim_rate", data.fim_rate)):
        if value:
            raise UsageError(
                f"{key}: {format_yaml_value(value)}: the samples of dataloader: engine are those of token files",
                f"set dataloader: primus, or remove {key}",
            )


def check_driver(trainer: Trainer, driver: MegatronDriver, device_name: str) -> None:
    """Accept an experiment in a worker, where the driver and the device are known.

    Raises:
        UsageError: A value is not supported; the message names its key and the fix.
    """
    check_number_format(trainer, device_name)
    if driver.checkout is None:
        check_core(trainer, has_engine_layers=driver.uses_transformer_engine)
        return
    _check_keys(trainer, has_checkout=True)


def _check_keys(trainer: Trainer, *, has_checkout: bool) -> None:
    """Accept the values that `keys.yaml` does; with a checkout of Megatron-LM, those of more keys."""
    rules = read_key_rules(FOLDER)
    check_key_rules(NAME, {k: rule for k, rule in rules.items() if not has_checkout or k not in CHECKOUT_KEYS}, trainer)


def check_core(trainer: Trainer, *, has_engine_layers: bool) -> None:
    """Accept an experiment that megatron-core can train without Megatron-LM.

    Args:
        trainer: The experiment's module.
        has_engine_layers: Whether the layers of Transformer Engine can be used, which need a GPU.

    Raises:
        UsageError: A value is not supported; the message names its key and the fix.
    """
    _check_keys(trainer, has_checkout=False)
    has_own_stages = model_checks.has_own_stages(trainer.backend_args)
    model_checks.check_parallel(
        trainer.model, trainer.parallel, trainer.training.seq_length, has_own_stages=has_own_stages
    )
    _raise_first(_find_model_problems(trainer.model))
    _raise_first(_find_layout_problems(trainer))
    check_setting_effects(trainer.backend_args)
    if not has_engine_layers:
        check_local_layers(trainer)
    elif trainer.data.reset_attention_mask:
        raise UsageError(
            "reset_attention_mask: true: Transformer Engine's attention does not support document masks",
            "set reset_attention_mask: false, or choose another framework",
        )


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


def _list_transformer_engine_settings(trainer: Trainer) -> Iterator[tuple[str, Any, Any]]:
    """Keys that need Transformer Engine, their values, and the value that does not.

    Sources: megatron/core/transformer/dot_product_attention.py refuses context parallelism and windows; the local
    layers of latent attention do not build (`DotProductAttention.__init__` has no `k_channels`).
    """
    model = trainer.model
    yield "multi_latent_attention", model.multi_latent_attention, False
    yield "window_size", model.window_size, None
    yield "fp8", trainer.training.fp8, None
    yield "fp4", trainer.backend_args.get("fp4"), None
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
            "moe_router_norm_topk_prob: false: megatron always renormalizes sigmoid scores",
            "set moe_router_norm_topk_prob: true, or choose another framework",
        )


def _find_layout_problems(trainer: Trainer) -> Iterator[MegatronProblem]:
    model, parallel = trainer.model, trainer.parallel
    tensor, stages = parallel.tensor_model_parallel_size, parallel.pipeline_model_parallel_size
    chunk, own_layers = trainer.backend_args.get("recompute_num_layers"), model.num_layers // stages
    if trainer.backend_args.get("recompute_method") == "uniform" and (chunk or 0) > own_layers:
        yield MegatronProblem(
            f"backend_args: recompute_num_layers: {chunk}: a pipeline stage has {own_layers} layers",
            f"set recompute_num_layers to at most {own_layers}",
        )
    if model.num_experts is not None and tensor > 1 and not parallel.sequence_parallel:
        yield MegatronProblem(
            "sequence_parallel: false: megatron trains experts with tensor parallelism only if the sequence is split",
            "set sequence_parallel: true, or tensor_model_parallel_size: 1",
        )


def _raise_first(problems: Iterator[MegatronProblem]) -> None:
    for problem in problems:
        raise UsageError(problem.text, problem.hint)
