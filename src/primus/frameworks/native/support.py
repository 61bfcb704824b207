"""Check that the native framework can train an experiment; needs no tensor library."""

from __future__ import annotations

from math import gcd
from pathlib import Path
from typing import TypeVar

from msgspec import structs

from primus import registry
from primus.checkpoint.folders import is_foreign
from primus.config.schema import Experiment, ModelSpec, Trainer
from primus.config.source import format_yaml_value
from primus.data.instruction.policy_settings import POLICY_FORMULAS, PolicySettings
from primus.data.instruction.preference_settings import PreferenceSettings
from primus.engine_keys import check_key_rules, read_key_rules
from primus.errors import UsageError
from primus.frameworks.native.kernel_settings import FP8_MULTIPLE, KernelSettings
from primus.frameworks.native.layout_settings import LayoutSettings
from primus.frameworks.native.router_settings import RouterSettings
from primus.frameworks.native.training_settings import TrainingSettings
from primus.models import model_checks
from primus.models.counts import num_dense_layers, num_query_groups
from primus.models.model_checks import PIPELINE_KEY
from primus.reward import REWARDS
from primus.session.checks import check_no_backend_args, check_session
from primus.session.settings.adapter_settings import AdapterSettings, check_targets, read_settings

FOLDER = Path(__file__).parent
SETTINGS = (
    *(AdapterSettings, KernelSettings, LayoutSettings, PolicySettings, PreferenceSettings, RouterSettings),
    TrainingSettings,
)
"""Kinds of settings under `overrides:` that are not of the schema."""
KEYS = tuple(key for kind in SETTINGS for key in kind.__struct_fields__)
S = TypeVar("S", KernelSettings, LayoutSettings, PolicySettings, PreferenceSettings, RouterSettings, TrainingSettings)


def check(experiment: Experiment) -> None:
    """Accept an experiment that native can train.

    Raises:
        UsageError: The experiment uses something that native does not support; names the field and the fix.
    """
    trainer = experiment.trainer
    check_key_rules("native", read_key_rules(FOLDER), trainer)
    if trainer.model.add_bias_linear or trainer.model.activation_clamp:
        _check_dense_layers(trainer.model)
    if trainer.model.hybrid_layer_pattern:
        _check_layer_kinds(trainer.model)
    if trainer.model.mtp_num_layers:
        _check_prediction(trainer.model)
    _check_rewinds(trainer)
    _check_layout(trainer)
    check_session(trainer, "native")
    if trainer.training.fp8 is not None:
        _check_float8(trainer)
    if trainer.backend_args:
        _check_training_settings(trainer)
        read_own_settings(trainer, KernelSettings)
        _check_virtual_stages(trainer)
        _check_routers(trainer)
        _check_adapters(trainer)
        _check_preferences(trainer)
    if trainer.backend_args or experiment.stage == "rl_trainer":
        _check_policy(experiment)


def check_model(spec: ModelSpec) -> None:
    """Accept a model that native supports.

    Raises:
        UsageError: The shape is impossible, or has something that native does not support; names the field.
    """
    check_key_rules("native", read_key_rules(FOLDER), Trainer(model=spec))
    model_checks.check(spec)
    _check_dense_layers(spec)
    _check_layer_kinds(spec)
    _check_prediction(spec)


def _check_dense_layers(spec: ModelSpec) -> None:
    """Refuse what only routed experts have here."""
    for key in ("add_bias_linear", "activation_clamp"):
        value = getattr(spec, key)
        if value and (num_dense_layers(spec) or spec.moe_shared_expert_intermediate_size):
            problem = f"{key}: {format_yaml_value(value)}: native does not support it outside of routed experts"
            raise UsageError(problem, "choose another framework")


def _check_prediction(spec: ModelSpec) -> None:
    """Refuse multi-token prediction in models whose published weights do not name its layers."""
    if spec.mtp_num_layers and not (spec.multi_latent_attention and spec.moe_router_enable_expert_bias):
        raise UsageError(
            f"mtp_num_layers: {spec.mtp_num_layers}: native does not support multi-token prediction outside of"
            " DeepSeek-V3's family",
            "set mtp_num_layers: 0",
        )


def _check_layer_kinds(spec: ModelSpec) -> None:
    """Refuse layers of other kinds than attention with and without a window."""
    others = "".join(sorted(set(spec.hybrid_layer_pattern or "") - {"*", "W"}))
    if others:
        problem = f"hybrid_layer_pattern: {spec.hybrid_layer_pattern}: native does not support layers of kind {others}"
        raise UsageError(problem, "choose another framework")


def _check_float8(trainer: Trainer) -> None:
    """Reject 8-bit products of numbers that are not bfloat16, with other recipes, or of a number of tokens that no
    device multiplies."""
    training, recipe = trainer.training, read_own_settings(trainer, KernelSettings).fp8_recipe
    if not training.bf16:
        raise UsageError(f"fp8: {training.fp8}: the other operators compute in bfloat16", "set bf16: true")
    if recipe not in ("tensorwise", "rowwise"):
        problem = f"fp8_recipe: {recipe}: native has scales of a matrix or of each of its rows"
        raise UsageError(problem, "set fp8_recipe: tensorwise or rowwise, or choose another framework")
    tokens = training.micro_batch_size * training.seq_length // trainer.parallel.context_parallel_size
    if tokens % FP8_MULTIPLE:
        raise UsageError(
            f"fp8: {training.fp8}: micro_batch_size x seq_length are {tokens} tokens of a process",
            f"use a multiple of {FP8_MULTIPLE}, such as {-(-tokens // FP8_MULTIPLE) * FP8_MULTIPLE}",
        )


def _check_rewinds(trainer: Trainer) -> None:
    """Reject a rewind policy without checkpoints to go back to."""
    for policy in ("nonfinite_policy", "loss_spike_policy"):
        if getattr(trainer.training, policy) == "rewind" and trainer.checkpoint.save_interval is None:
            raise UsageError(f"{policy}: rewind needs checkpoints, and save_interval is not set", "set save_interval")


def read_own_settings(trainer: Trainer, kind: type[S]) -> S:
    """The settings of a kind.

    Raises:
        UsageError: A value is not valid; names the key.
    """
    return read_settings(trainer.backend_args, kind, "docs/training.md")


def _check_training_settings(trainer: Trainer) -> None:
    """Reject settings that contradict each other."""
    settings, training, optimizer = (
        read_own_settings(trainer, TrainingSettings),
        trainer.training,
        trainer.optimizer.optimizer,
    )
    is_adam = optimizer in ("adam", "adamw", "adamw_8bit")
    by_module = bool(settings.recompute_modules)
    for problem, hint, is_wrong in (
        (
            "mtp_loss_scaling_factor: the model has no layers of multi-token prediction",
            "set mtp_num_layers, or remove it",
            "mtp_loss_scaling_factor" in trainer.backend_args and not trainer.model.mtp_num_layers,
        ),
        ("fp16: true: bf16 is true as well", "set bf16: false", settings.fp16 and training.bf16),
        (
            "recompute_activations: true recomputes whole layers, recompute_granularity: selective parts of them",
            "set one of them",
            training.recompute_activations and settings.recompute_granularity == "selective",
        ),
        (
            # torch 2.13 cannot make the mask of a part of the queries (CausalBias) while it watches operators.
            "recompute_granularity: selective: not with context_parallel_size > 1 unless modules are named",
            "set recompute_granularity: full, or recompute_modules",
            settings.recompute_granularity == "selective"
            and not by_module
            and trainer.parallel.context_parallel_size > 1,
        ),
        (
            "recompute_modules: only with recompute_granularity: selective",
            "set it",
            by_module and settings.recompute_granularity != "selective",
        ),
        (
            f"main_params_dtype: bf16: not with optimizer: {optimizer}",
            "set optimizer: adamw or adamw_8bit",
            settings.main_params_dtype == "bf16" and not is_adam,
        ),
        (
            "main_params_dtype: bf16: the passes compute in another precision",
            "set bf16: true",
            settings.main_params_dtype == "bf16" and not training.bf16,
        ),
        (
            "optimizer_cpu_offload: not with optimizer: muon, whose matrices are exchanged between devices",
            "remove it, or set optimizer: adamw",
            settings.optimizer_cpu_offload and optimizer == "muon",
        ),
    ):
        if is_wrong:
            raise UsageError(problem, hint)


def _check_routers(trainer: Trainer) -> None:
    """Check the settings of routers; a dense model has none."""
    read_own_settings(trainer, RouterSettings)
    named = [key for key in RouterSettings.__struct_fields__ if trainer.backend_args.get(key) is not None]
    if named and trainer.model.num_experts is None:
        raise UsageError(f"{named[0]}: a dense model has no experts", "set num_experts, or remove it")


def _check_preferences(trainer: Trainer) -> None:
    """Check the settings of preferences, which need pairs of answers, and sequences in one process."""
    settings = read_own_settings(trainer, PreferenceSettings)
    if settings.loss in ("sft", *POLICY_FORMULAS):
        given = [key for key in ("beta", "gamma") if trainer.backend_args.get(key) is not None]
        if given:
            raise UsageError(
                f"{given[0]}: the loss is {settings.loss}", "set loss: dpo, ipo, orpo or simpo, or remove it"
            )
        return
    if not trainer.data.sft_data_path:
        raise UsageError(f"loss: {settings.loss}: no pairs of answers are named", "set sft_data_path")
    _check_whole_logits(trainer, settings.loss)


def _check_whole_logits(trainer: Trainer, loss: str) -> None:
    """Refuse what the losses of log-probabilities do not know."""
    if trainer.model.final_logit_softcapping is not None:
        raise UsageError(f"final_logit_softcapping: native does not train {loss} with it", "choose another model")
    for key in ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size"):
        if getattr(trainer.parallel, key) > 1:
            raise UsageError(f"{key}: native trains {loss} with whole layers and sequences", f"set {key}: 1")


def _check_policy(experiment: Experiment) -> None:
    """Check the settings of reinforcement learning, which is what a module `rl_trainer` does, and no other."""
    trainer, is_policy = experiment.trainer, experiment.stage == "rl_trainer"
    loss = read_own_settings(trainer, PreferenceSettings).loss
    settings = read_own_settings(trainer, PolicySettings)
    if not is_policy:
        given = [key for key in PolicySettings.__struct_fields__ if trainer.backend_args.get(key) is not None]
        if loss in POLICY_FORMULAS or given:
            problem = f"loss: {loss}" if loss in POLICY_FORMULAS else f"{given[0]}: it is a setting of `train rl`"
            raise UsageError(f"{problem}: the module is {experiment.stage}", "name the module rl_trainer")
        return
    training, names = trainer.training, " or ".join(POLICY_FORMULAS)
    group, size = settings.num_generations, training.global_batch_size
    for problem, hint, is_wrong in (
        (f"module rl_trainer: loss: {loss} needs no rollouts", f"set loss: {names}", loss not in POLICY_FORMULAS),
        ("module rl_trainer: no prompts are named", "set sft_data_path", not trainer.data.sft_data_path),
        ("module rl_trainer: no rewards are named", "set rewards: {exact: 1.0}", not settings.rewards),
        (
            f"global_batch_size: {size} completions are not whole groups of num_generations {group}",
            f"use a multiple of {group}",
            size is None or size % group != 0,
        ),
        (
            f"max_new_tokens: {settings.max_new_tokens} leaves a prompt no room in seq_length {training.seq_length}",
            "raise seq_length, or lower max_new_tokens",
            settings.max_new_tokens >= training.seq_length,
        ),
        (
            "updates_per_rollout: above 1 the ratios need temperature: 1",
            "set one of them to 1",
            settings.updates_per_rollout > 1 and settings.temperature != 1.0,
        ),
        ("compile: rollouts have many lengths", "set compile: false", training.compile is not False),
        (
            "eval_interval: train rl evaluates no loss; each step reports its rewards",
            "remove it",
            training.eval_interval is not None,
        ),
        (
            "rewards: format needs a regular expression",
            "set reward_pattern",
            "format" in settings.rewards and settings.reward_pattern is None,
        ),
        ("packed_sequence: rollouts are not packed", "remove it", trainer.data.packed_sequence),
    ):
        if is_wrong:
            raise UsageError(problem, hint)
    for name in settings.rewards:
        registry.load_plug_in(REWARDS, name)
    _check_whole_logits(trainer, loss)


def _check_layout(trainer: Trainer) -> None:
    """Reject key/value heads that tensor-parallel processes would have to repeat, and tokens that they cannot share."""
    size, groups = trainer.parallel.tensor_model_parallel_size, num_query_groups(trainer.model)
    if groups % size:
        key = "tensor_model_parallel_size"
        raise UsageError(f"{key}: {size} does not divide num_query_groups {groups}", f"set {key}: {gcd(size, groups)}")
    if size > 1 and trainer.model.qk_layernorm_across_heads:
        problem = f"tensor_model_parallel_size: {size} divides heads that qk_layernorm_across_heads norms together"
        raise UsageError(problem, "set tensor_model_parallel_size: 1")
    tokens = trainer.training.seq_length // trainer.parallel.context_parallel_size
    if trainer.model.num_experts and tokens % size:
        raise UsageError(
            f"seq_length: {tokens} tokens of a process do not divide into {size} equal parts",
            f"use a multiple of {size * trainer.parallel.context_parallel_size} (each tensor-parallel process routes"
            " a part)",
        )


def _check_virtual_stages(trainer: Trainer) -> None:
    """Reject groups of layers that do not divide, or that no pipeline stage has."""
    key = "num_virtual_stages_per_pipeline_rank"
    groups = read_own_settings(trainer, LayoutSettings).num_virtual_stages_per_pipeline_rank
    stages, layers = trainer.parallel.pipeline_model_parallel_size, trainer.model.num_layers
    if groups > 1 and stages == 1:
        raise UsageError(f"{key}: {groups}: there is one pipeline stage", f"raise {PIPELINE_KEY}, or remove it")
    if layers % (groups * stages):
        valid = [each for each in range(1, layers // stages + 1) if layers % (each * stages) == 0]
        problem = f"{key}: {groups} does not divide the {layers // stages} layers of a stage"
        raise UsageError(problem, f"use one of {', '.join(map(str, valid))}")


def _check_adapters(trainer: Trainer) -> None:
    """Check the settings of adapters; they need a model that can be loaded again."""
    others = {key: value for key, value in trainer.backend_args.items() if key not in KEYS}
    check_no_backend_args(structs.replace(trainer, backend_args=others), "native")
    settings = read_settings(trainer.backend_args, AdapterSettings)
    if settings.peft == "none":
        return
    if settings.peft == "dora" and settings.peft_dropout:
        raise UsageError("peft_dropout: native trains dora without it", "set peft_dropout: 0, or peft: lora")
    check_targets(settings)
    parallel = trainer.parallel
    for key in ("tensor_model_parallel_size", "pipeline_model_parallel_size"):
        if getattr(parallel, key) > 1:
            raise UsageError(f"{key}: native trains adapters with whole layers only", f"set {key}: 1")
    load, finetune = trainer.checkpoint.load, trainer.checkpoint.finetune
    if load is None or not (finetune or is_foreign(load)):
        problem = "load names no model to adapt" if load is None else "training cannot continue from load"
        raise UsageError(f"peft: {settings.peft}: {problem}", "set load: CHECKPOINT and finetune: true")
