"""Check that a model can be built and distributed over devices, and is the published one that it names."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from msgspec import Struct, structs

from primus import registry
from primus.config.extended_files import load_model
from primus.config.load import Resolved
from primus.config.schema import ModelSpec, ParallelConfig
from primus.config.source import format_yaml_value
from primus.config.translation.pipeline_stages import STAGE_SETTINGS
from primus.errors import PrimusError, UsageError
from primus.models.counts import expert_ffn_size, head_dim, num_moe_layers, num_query_groups

PIPELINE_KEY = "pipeline_model_parallel_size"
HUB_PREFIX = "hf:"
FREE_KEYS = frozenset(
    "hf_name num_layers vocab_size max_position_embeddings init_method_std moe_aux_loss_coeff mtp_num_layers".split()
)
"""Keys that a smaller or differently trained variant of a model changes; loaded weights check the sizes among them."""
ROPE_KEYS = (
    "rotary_scaling_factor rope_low_freq_factor rope_high_freq_factor original_max_position_embeddings beta_fast"
    " beta_slow mscale mscale_all_dim yarn_correction_range_round_to_int".split()
)
"""Keys without effect, or with another one, where `rope_type` is another."""
EXPERT_LAYERS = ("first_k_dense_replace", "num_hash_layers")
"""Keys about layers with experts whose names do not begin with `moe_`."""


def check(spec: ModelSpec, origins: Mapping[str, str] | None = None) -> None:
    """Accept a shape that can be built.

    Args:
        spec: The shape.
        origins: Where each key was set (`exp.yaml:12`), for the message.

    Raises:
        UsageError: It cannot; the message names the key to change.
    """
    _raise_first(find_problems(spec), origins or {})


def check_parallel(
    spec: ModelSpec,
    parallel: ParallelConfig,
    seq_length: int | None = None,
    origins: Mapping[str, str] | None = None,
    has_own_stages: bool = False,
) -> None:
    """Accept a layout that divides the model, and the sequence if its length is given.

    Args:
        spec: The model.
        parallel: The layout.
        seq_length: Tokens in one sequence.
        origins: Where each key was set (`exp.yaml:12`), for the message.
        has_own_stages: Whether settings of the engine place the layers on pipeline stages, which may be uneven.

    Raises:
        UsageError: It does not; the message names the key to change.
    """
    problems = find_parallel_problems(spec, parallel, seq_length)
    _raise_first((p for p in problems if not (has_own_stages and p.key == PIPELINE_KEY)), origins or {})


def has_own_stages(backend_args: Mapping[str, Any]) -> bool:
    """Whether settings of Megatron-LM place the layers on pipeline stages."""
    return any(backend_args.get(name) for name in STAGE_SETTINGS)


def find_problems(spec: ModelSpec) -> Iterator[ModelProblem]:
    """List the problems of an impossible shape."""
    yield from _find_attention_problems(spec)
    yield from _find_latent_attention_problems(spec)
    yield from _find_rope_problems(spec)
    yield from _find_expert_problems(spec)
    if spec.hybrid_layer_pattern:
        yield from _find_pattern_problems(spec, spec.hybrid_layer_pattern)


def find_parallel_problems(
    spec: ModelSpec, parallel: ParallelConfig, seq_length: int | None = None
) -> Iterator[ModelProblem]:
    """List the problems of dividing the model by a layout, and the sequence if its length is given.

    Source: the argument checks of Megatron-LM (`validate_args`, `TransformerConfig.__post_init__`).
    """
    if parallel.tensor_model_parallel_size > 1:
        yield from _find_tensor_parallel_problems(spec, parallel.tensor_model_parallel_size)
    elif parallel.sequence_parallel:
        yield ModelProblem(
            "sequence_parallel", "there is one tensor-parallel device", "raise tensor_model_parallel_size"
        )
    pipeline = parallel.pipeline_model_parallel_size
    if spec.num_layers % pipeline:
        yield _make_divisor_problem(PIPELINE_KEY, pipeline, "num_layers", spec.num_layers)
    yield from _find_expert_parallel_problems(spec, parallel)
    if seq_length is not None:
        yield from _find_sequence_problems(parallel, seq_length)


def _raise_first(found: Iterator[ModelProblem], origins: Mapping[str, str]) -> None:
    for problem in found:
        where = origins.get(problem.key, "default")
        key = problem.key if where in ("default", f"--{problem.key}") else f"{where}: {problem.key}"
        raise UsageError(f"{key}: {problem.text}", problem.hint)


def _make_divisor_problem(key: str, value: int, whole: str, size: int) -> ModelProblem:
    choices = ", ".join(str(divisor) for divisor in _list_divisors(size)[:12])
    return ModelProblem(key, f"{value} does not divide {whole} {size}", f"use one of {choices}")


def _list_divisors(number: int) -> list[int]:
    return [candidate for candidate in range(1, number + 1) if number % candidate == 0]


def _find_attention_problems(spec: ModelSpec) -> Iterator[ModelProblem]:
    n, g = spec.num_attention_heads, num_query_groups(spec)
    if n % g:
        yield _make_divisor_problem("num_query_groups", g, "num_attention_heads", n)
    if spec.window_size is None and spec.window_layer_period != 1:
        yield ModelProblem(
            "window_layer_period", "the model has no attention window", "set window_size, or remove window_layer_period"
        )
    if spec.qk_layernorm_across_heads and not spec.qk_layernorm:
        yield ModelProblem(
            "qk_layernorm_across_heads", "there are no norms of queries and keys", "set qk_layernorm: true"
        )
    if spec.multi_latent_attention:
        return
    if spec.kv_channels is None and spec.hidden_size % n:
        problem = _make_divisor_problem("num_attention_heads", n, "hidden_size", spec.hidden_size)
        yield ModelProblem(
            problem.key, problem.text, "set kv_channels, the width of one head, or change one of the two"
        )
    elif head_dim(spec) % 2:
        origin = "kv_channels" if spec.kv_channels else "hidden_size"
        yield ModelProblem(
            origin, f"heads are {head_dim(spec)} wide", "rotary embedding turns pairs: use an even width"
        )


def _find_latent_attention_problems(spec: ModelSpec) -> Iterator[ModelProblem]:
    widths = ("kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim")
    if not spec.multi_latent_attention:
        compressed = {"q_lora_rank", "qk_pos_emb_head_dim"} if spec.o_lora_rank else set()
        for key in (*widths, "q_lora_rank"):
            if getattr(spec, key) is not None and key not in compressed:
                yield ModelProblem(
                    key, "only latent attention has it", "set multi_latent_attention: true, or remove it"
                )
        return
    for key in widths:
        if getattr(spec, key) is None:
            yield ModelProblem(
                key, "latent attention needs it", "DeepSeek uses 512, 128, 64, 128 for " + ", ".join(widths)
            )
    if spec.qk_pos_emb_head_dim and spec.qk_pos_emb_head_dim % 2:
        yield ModelProblem("qk_pos_emb_head_dim", f"{spec.qk_pos_emb_head_dim} is odd", "rotary embedding turns pairs")
    for key in ("qk_layernorm", "add_qkv_bias", "add_bias_linear", "attention_sinks"):
        if getattr(spec, key):
            yield ModelProblem(key, "latent attention does not have it", f"set {key}: false")


def _find_rope_problems(spec: ModelSpec) -> Iterator[ModelProblem]:
    if spec.rope_type == "default" and spec.rotary_scaling_factor != 1.0:
        yield ModelProblem(
            "rotary_scaling_factor", "rope_type default does not scale", "set rope_type: linear, llama3 or yarn"
        )
    if spec.rope_type == "llama3" and spec.rope_low_freq_factor >= spec.rope_high_freq_factor:
        text = f"{spec.rope_low_freq_factor} is not below rope_high_freq_factor {spec.rope_high_freq_factor}"
        yield ModelProblem("rope_low_freq_factor", text, "Llama 3 uses 1 and 4")
    if spec.rope_type == "yarn" and spec.beta_slow > spec.beta_fast:
        yield ModelProblem("beta_slow", f"{spec.beta_slow} is above beta_fast {spec.beta_fast}", "yarn uses 1 and 32")


_KEYS_OF_KINDS = {
    "W": ("window_size",),
    "G": ("linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim"),
    "K": ("linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim"),
    "H": ("window_size", "q_lora_rank", "o_lora_rank"),
    "S": ("window_size", "q_lora_rank", "o_lora_rank", "dsa_indexer_n_heads", "dsa_indexer_head_dim"),
}
"""Fields that each character of hybrid_layer_pattern requires."""


def _find_pattern_problems(spec: ModelSpec, pattern: str) -> Iterator[ModelProblem]:
    for character in dict.fromkeys(pattern):
        for key in _KEYS_OF_KINDS.get(character, ()):
            if getattr(spec, key) is None:
                yield ModelProblem(key, f"layers `{character}` of hybrid_layer_pattern need it", "set it in the model")
    if spec.window_layer_period != 1:
        yield ModelProblem(
            "window_layer_period", "hybrid_layer_pattern names the windowed layers", "remove one of the two"
        )
    inner = spec.mamba_expand * spec.hidden_size
    if "M" in pattern and inner % spec.mamba_head_dim:
        text = f"{spec.mamba_head_dim} does not divide mamba_expand x hidden_size = {inner}"
        yield ModelProblem("mamba_head_dim", text, "use a divisor")


def _find_expert_problems(spec: ModelSpec) -> Iterator[ModelProblem]:
    if spec.num_experts is None:
        for field in structs.fields(ModelSpec):
            is_of_experts = field.name.startswith("moe_") or field.name in EXPERT_LAYERS
            if is_of_experts and getattr(spec, field.name) != field.default:
                yield ModelProblem(field.name, "a dense model has no experts", "set num_experts, or remove it")
        return
    if spec.moe_router_topk > spec.num_experts:
        text = f"{spec.moe_router_topk} is more than num_experts {spec.num_experts}"
        yield ModelProblem("moe_router_topk", text, "send each token to fewer experts")
    if spec.first_k_dense_replace >= spec.num_layers:
        text = f"{spec.first_k_dense_replace} leaves none of {spec.num_layers} layers with experts"
        yield ModelProblem("first_k_dense_replace", text, "use fewer dense layers, or set num_experts: null")
    if spec.moe_apply_probs_on_input and spec.moe_router_topk > 1:
        text = f"true needs one expert of a token, and moe_router_topk is {spec.moe_router_topk}"
        yield ModelProblem("moe_apply_probs_on_input", text, "set moe_router_topk: 1, or false")
    yield from _find_expert_group_problems(spec, spec.num_experts)


def _find_expert_group_problems(spec: ModelSpec, num_experts: int) -> Iterator[ModelProblem]:
    groups, topk = spec.moe_router_num_groups, spec.moe_router_group_topk
    if groups is None and topk is None:
        return
    if groups is None or topk is None:
        missing = "moe_router_num_groups" if groups is None else "moe_router_group_topk"
        yield ModelProblem(
            missing, "group-limited routing needs it", "set both or neither of groups and groups of a token"
        )
        return
    if num_experts % groups:
        yield _make_divisor_problem("moe_router_num_groups", groups, "num_experts", num_experts)
    if topk > groups:
        yield ModelProblem("moe_router_group_topk", f"{topk} is more than moe_router_num_groups {groups}", "use fewer")
    elif topk * (num_experts // groups) < spec.moe_router_topk:
        text = f"{topk} groups of {num_experts // groups} experts are fewer than moe_router_topk {spec.moe_router_topk}"
        yield ModelProblem("moe_router_group_topk", text, "let a token go to more groups, or to fewer experts")


def _find_tensor_parallel_problems(spec: ModelSpec, size: int) -> Iterator[ModelProblem]:
    key = "tensor_model_parallel_size"
    if spec.num_attention_heads % size:
        yield _make_divisor_problem(key, size, "num_attention_heads", spec.num_attention_heads)
    groups = num_query_groups(spec)
    if not spec.multi_latent_attention and groups % size and size % groups:
        text = f"{size} neither divides num_query_groups {groups} nor is a multiple of it"
        yield ModelProblem(key, text, "key/value heads are shared out or repeated, whole")
    moe = num_moe_layers(spec)
    if moe < spec.num_layers and spec.ffn_hidden_size % size:
        yield _make_divisor_problem(key, size, "ffn_hidden_size", spec.ffn_hidden_size)
    if moe and expert_ffn_size(spec) % size:
        yield _make_divisor_problem(key, size, "moe_ffn_hidden_size", expert_ffn_size(spec))


def _find_expert_parallel_problems(spec: ModelSpec, parallel: ParallelConfig) -> Iterator[ModelProblem]:
    key, size = "expert_model_parallel_size", parallel.expert_model_parallel_size
    if size > 1 and spec.num_experts is None:
        yield ModelProblem(key, f"{size}, but a dense model has no experts", f"set {key}: 1")
    elif spec.num_experts and spec.num_experts % size:
        yield _make_divisor_problem(key, size, "num_experts", spec.num_experts)


def _find_sequence_problems(parallel: ParallelConfig, seq_length: int) -> Iterator[ModelProblem]:
    """A device of a context-parallel group holds one chunk from each end, so that causal work is even."""
    tensor, context = parallel.tensor_model_parallel_size, parallel.context_parallel_size
    chunks = 2 * context if context > 1 else 1
    shards = tensor if parallel.sequence_parallel else 1
    if seq_length % (chunks * shards):
        text = f"{seq_length} does not divide into {chunks * shards} equal parts"
        why = "2 for each context-parallel device, each shared by the tensor-parallel ones of sequence_parallel"
        yield ModelProblem("seq_length", text, f"use a multiple of {chunks * shards} ({why})")


class ModelProblem(Struct, frozen=True):
    """Why a model cannot be built, or not with this layout."""

    key: str
    """The key to change."""
    text: str
    """Description of the problem."""
    hint: str = ""
    """How to fix it."""


class ModelDifference(Struct, frozen=True):
    """A key with another value than in the published model."""

    key: str
    value: Any
    published: Any


def check_published_model(resolved: Resolved) -> tuple[str, ...]:
    """A note if the model differs from the published one that it names.

    Raises:
        UsageError: It loads the weights of a published model with a setting of another; the message names it. A setting
            that is given on the command line is meant to differ.
    """
    load = resolved.experiment.trainer.checkpoint.load or ""
    loaded = _find_loaded_model(load.removeprefix(HUB_PREFIX)) if load.startswith(HUB_PREFIX) else None
    for each in _list_differences(resolved, loaded) if loaded else ():
        value, theirs = format_yaml_value(each.value), format_yaml_value(each.published)
        raise UsageError(
            f"{resolved.origins[each.key]}: {each.key}: {value}, but the model of load: {load} has {theirs}",
            f"set {each.key}: {theirs}; to train with {value}, give it on the command line: --{each.key} {value}",
        )
    name = resolved.experiment.trainer.model.hf_name
    published = find_published_model(name)
    if published is None:
        return ()
    listed = [
        f"{each.key} {format_yaml_value(each.value)} (there {format_yaml_value(each.published)})"
        for each in _list_differences(resolved, published)
    ]
    return (f"the model differs from {name}: {', '.join(listed)}",) if listed else ()


def _list_differences(resolved: Resolved, published: ModelSpec) -> list[ModelDifference]:
    """Those that the command line does not ask for."""
    found = list_model_differences(resolved.experiment.trainer.model, published)
    return [each for each in found if not resolved.origins[each.key].startswith("--")]


def find_published_model(name: str) -> ModelSpec | None:
    """The preset with the shape of the model `name` of the Hugging Face Hub."""
    line = re.compile(rf"^hf_name: {re.escape(name)}$", re.MULTILINE)
    for file in sorted((registry.PACKAGE / "presets/models").glob("[!_]*.yaml")) if name else ():
        if line.search(file.read_text(encoding="utf-8")):
            return load_model(file.stem)
    return None


def list_model_differences(spec: ModelSpec, published: ModelSpec) -> Iterator[ModelDifference]:
    """The settings of a model that change its results and are not those of a published one."""
    unused = {*FREE_KEYS, *(ROPE_KEYS if spec.rope_type != published.rope_type else ())}
    one, other = _resolve_defaults(spec), _resolve_defaults(published)
    for key in ModelSpec.__struct_fields__:
        if key not in unused and getattr(one, key) != getattr(other, key):
            yield ModelDifference(key, getattr(one, key), getattr(other, key))


def _resolve_defaults(spec: ModelSpec) -> ModelSpec:
    """`spec` with one form of what can be written in several, and without sizes that nothing has."""
    changes: dict[str, Any] = {"num_query_groups": None, "kv_channels": None}  # latent attention has its own
    if not spec.multi_latent_attention:
        changes = {"num_query_groups": num_query_groups(spec), "kv_channels": head_dim(spec)}
    if spec.num_experts is not None:
        changes["moe_ffn_hidden_size"] = expert_ffn_size(spec)
        if num_moe_layers(spec) == spec.num_layers:
            changes["ffn_hidden_size"] = expert_ffn_size(spec)
        if spec.moe_router_score_function == "softmax" and not spec.moe_router_pre_softmax:
            # Softmax over the chosen experts is softmax over all, renormalized over the chosen ones.
            changes |= {"moe_router_pre_softmax": True, "moe_router_norm_topk_prob": True}
    return structs.replace(spec, **changes)


def _find_loaded_model(name: str) -> ModelSpec | None:
    """The model whose weights `load: hf:NAME` names, where its config.json or a preset says it."""
    file = Path(os.path.expanduser(name)) / "config.json"
    if not file.is_file():
        return find_published_model(name.partition("@")[0])
    from primus.config.imports.foreign_config import make_model  # not for experiments that load no weights
    from primus.config.imports.read_file import read_foreign_file

    try:
        return make_model(read_foreign_file(file, {}))
    except PrimusError:  # the backend's check says what is wrong with the file
        return None
