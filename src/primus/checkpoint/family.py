"""Model families: which tensors a model has, by their Hugging Face names, and where an engine keeps them.

A family is a file in `families/`, named as the `model_type` of Hugging Face. `extends:` takes over another family's
tensors; an entry of the same name replaces, `null` removes. Where an engine keeps them is in its `weights.yaml`.
This module imports no tensor library.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from msgspec import Struct

from primus import registry
from primus.config.schema import ModelSpec
from primus.errors import UsageError, did_you_mean
from primus.models import counts

FAMILIES = Path(__file__).parent / "families"
WEIGHTS = "weights"
"""Kind of plug-in that names an engine's tensors."""

CONDITIONS: dict[str, Callable[[ModelSpec], bool]] = {
    "untied": lambda spec: spec.untie_embeddings_and_output_weights,
    "experts": lambda spec: spec.num_experts is not None,
    "shared_experts": lambda spec: spec.moe_shared_expert_intermediate_size is not None,
    "expert_bias": lambda spec: spec.moe_router_enable_expert_bias,
    "qkv_bias": lambda spec: spec.add_qkv_bias,
    "linear_bias": lambda spec: spec.add_bias_linear,
    "qk_norm": lambda spec: spec.qk_layernorm,
    "latent_attention": lambda spec: spec.multi_latent_attention,
    "latent_query": lambda spec: spec.q_lora_rank is not None,
    "sinks": lambda spec: spec.attention_sinks,
    "zero_centered_norms": lambda spec: spec.zero_centered_norms,
    "norms_before": lambda spec: spec.pre_layernorm,
    "unrotated_layers": lambda spec: spec.no_rope_freq is not None,
}
"""What `when:` may ask of a model; `not NAME` is the opposite."""

BUFFERS = ("e_score_correction_bias",)
"""Ends of names of tensors that no optimizer updates: the balancing bias of DeepSeek-V3."""

LAYER_CONDITIONS = ("dense", "moe", "mtp")
"""What `when:` may ask of a layer: its feed-forward, or whether it is one of multi-token prediction."""

UNSUPPORTED = {
    "packed_projections": "queries, keys and values in one matrix",
    "hybrid_layer_pattern": "layers of several kinds",
    "attention_output_gate": "gated attention",
    "qk_layernorm_across_heads": "query and key norms across heads",
    "global_kv_channels": "heads of several widths",
    "no_rope_freq": "layers without rotary embedding",
    "attention_chunk_size": "chunked attention",
    "post_layernorm": "norms after attention and feed-forward",
    "pre_layernorm": "no norms before attention and feed-forward",
    "zero_centered_norms": "norms of 1 + weight",
    "scale_embeddings": "scaled embeddings",
    "window_rotary_base": "another theta of windowed layers",
    "query_pre_attn_scalar": "another scale of the queries",
    "attn_logit_softcapping": "soft-capped scores of attention",
    "final_logit_softcapping": "soft-capped logits",
    "num_residual_streams": "hyper-connections",
    "num_hash_layers": "experts chosen by the id of the token",
    "attn_res_block_size": "attention residuals",
    "moe_shared_expert_gate": "a gate on the shared experts",
    "moe_latent_size": "experts of a latent width",
    "moe_parallel_dense": "experts in parallel with a dense feed-forward",
    "dsa_indexer_n_heads": "the indexer of sparse attention",
    "o_lora_rank": "a latent output projection",
}
"""Fields of a ModelSpec for whose weights no family has names, unless it `supports` them, with their meaning."""


SEPARATE_PROJECTION = re.compile(r"(\.qkv_linear)\.w[qkv]\.")
"""In names of torchtitan's files: a part of the parameter `wqkv` (torchtitan/models/common/attention.py,
FusedQKVLinear)."""
PROJECTION_ORDERS = {"keep": "by_query_group", "rotary_pairs": "rotary_pairs_by_query_group"}
"""Order of the rows of that parameter, by that of the query's in files."""


class HubTensor(Struct, frozen=True, forbid_unknown_fields=True):
    """One tensor of Hugging Face files."""

    shape: list[str]
    when: list[str] = []


class EngineRule(Struct, frozen=True, forbid_unknown_fields=True):
    """The hub tensors of which one tensor of an engine consists."""

    hub: list[str]
    rows: str = "keep"
    """Order of their rows, see `row_orders`; `keep_padded` where the engine may have more rows, `zeros` for a vector of
    zeros, one for each row, that the hub does not have."""
    when: list[str] = []
    tied: str | None = None
    """Hub tensor in their place where the model does not have them: the embedding, for a copy in the output head."""


class ModelFamily(Struct, frozen=True, forbid_unknown_fields=True):
    """A file of `families/`, with what it extends."""

    when: list[str]
    """Conditions of the models that belong to it."""
    architecture: str
    """The class in transformers."""
    hub: dict[str, HubTensor | list[str] | None]
    extends: str | None = None
    supports: list[str] = []
    """Fields of `UNSUPPORTED` that models of this family may have."""
    copies: dict[str, str | None] = {}
    """Hub tensors that files may have besides, and of which one they are a copy."""


EngineRules = dict[str, EngineRule | str | None]
"""The hub tensor, or a rule, by the name of an engine's tensor; None for one that an extended family has alone."""


class EngineWeights(Struct, frozen=True):
    """An engine's `weights.yaml`."""

    families: dict[str, EngineRules | None]
    """Rules by family; None for a family that the engine does not have."""
    prediction_layers: dict[str, str]
    """Start of names in layers, and that in layers of multi-token prediction."""


class TensorPart(NamedTuple):
    """A matrix or vector: a tensor, or one expert of a tensor that stacks all of them."""

    name: str
    expert: int | None = None
    transposed: bool = False


class NameRule(NamedTuple):
    """The hub parts that one part of an engine's tensors consists of."""

    engine: TensorPart
    hub: tuple[TensorPart, ...]
    rows: str


def choose_family(spec: ModelSpec) -> tuple[str, ModelFamily]:
    """The family of a model, and its name.

    Raises:
        UsageError: Weights of such a model have no names; says which field.
    """
    defaults = {field.name: field.default for field in msgspec.structs.fields(ModelSpec)}
    special = [field for field in UNSUPPORTED if getattr(spec, field) != defaults[field]]
    for name in list_families():
        family = load_family(name)
        if set(special) <= set(family.supports) and all(_holds(condition, spec) for condition in family.when):
            return name, family
    if special:
        field = special[0]
        raise UsageError(
            f"{field}: {getattr(spec, field)}: checkpoints of models with {UNSUPPORTED[field]} cannot be converted",
            f"families with weight names: {', '.join(list_families())}",
        )
    asked = ", ".join(name for name, holds in CONDITIONS.items() if holds(spec)) or "a dense model"
    raise UsageError(
        f"no model family has these features together: {asked}",
        f"families with weight names: {', '.join(list_families())}",
    )


def list_families() -> list[str]:
    """Names of all families."""
    return sorted(file.stem for file in FAMILIES.glob("*.yaml"))


@cache
def load_family(name: str) -> ModelFamily:
    """The family in the file of this name, with what it extends."""
    return msgspec.convert(_merge_files(name), ModelFamily)


def list_hub_shapes(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Shape of every tensor that a model has in Hugging Face files, in their order there.

    Raises:
        UsageError: Weights of such a model have no names.
    """
    return dict(_compute_hub_shapes(spec))


@lru_cache(maxsize=2)
def _compute_hub_shapes(spec: ModelSpec) -> Mapping[str, tuple[int, ...]]:
    """The shapes, once for each model: one with hundreds of experts has 50,000 tensors, and readers ask repeatedly."""
    family = choose_family(spec)[1]
    symbols = _compute_symbols(spec)
    shapes = {}
    for pattern, entry in family.hub.items():
        if entry is None:
            continue
        tensor = entry if isinstance(entry, HubTensor) else HubTensor(entry)
        shape = tuple(symbols[symbol] for symbol in tensor.shape)
        for layer in _list_layers(tensor.when, spec)[: None if "<layer>" in pattern else 1]:
            for name, _ in _fill_pattern(pattern, layer, spec):
                shapes[name] = shape
    return dict(sorted(shapes.items(), key=lambda item: _order_key(item[0])))


def list_rules(spec: ModelSpec, engine: str) -> list[NameRule]:
    """Rules of an engine for all tensors of a model.

    Raises:
        UsageError: The engine has no names for models of this family.
    """
    return list(_compute_rules(spec, engine))


@lru_cache(maxsize=2)
def _compute_rules(spec: ModelSpec, engine: str) -> tuple[NameRule, ...]:
    """The rules, once for a model and an engine."""
    name, family = choose_family(spec)
    patterns = read_engine_rules(engine, name)
    if patterns is None:
        known = ["huggingface", *(each for each in registry.list_plug_ins(WEIGHTS) if read_engine_rules(each, name))]
        raise UsageError(f"{engine} has no names for the weights of {family.architecture}", did_you_mean(engine, known))
    shapes = _compute_hub_shapes(spec)
    prefixes = _load_engine(engine).prediction_layers
    rules = []
    for pattern, entry in patterns.items():
        if entry is not None:
            rule = entry if isinstance(entry, EngineRule) else EngineRule([entry])
            rules += _fill_rule(pattern, rule, spec, shapes, prefixes)
    _check_complete(rules, shapes, name, engine)
    return tuple(rules)


def read_engine_rules(engine: str, family: str | None) -> EngineRules | None:
    """The rules of an engine for a family, with those for what it extends; None if the engine does not have it."""
    if family is None or not registry.has_plug_in(WEIGHTS, engine):
        return None
    rules, inherited = _load_engine(engine).families, read_engine_rules(engine, load_family(family).extends)
    if family not in rules:
        return inherited
    own = rules[family]
    return None if own is None else {**(inherited or {}), **own}


@cache
def _load_engine(engine: str) -> EngineWeights:
    file = registry.find_plug_in_file(WEIGHTS, engine)
    assert file is not None, "tables of weights are files"
    families = _read_yaml(file)
    prediction_layers = families.pop("prediction_layers", {})
    return msgspec.convert({"families": families, "prediction_layers": prediction_layers}, EngineWeights)


def list_trained_shapes(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Shape of every tensor that an optimizer has a state for, by its name in Hugging Face files."""
    return {name: shape for name, shape in list_hub_shapes(spec).items() if not name.endswith(BUFFERS)}


def list_parameter_rules(spec: ModelSpec, engine: str) -> list[NameRule]:
    """Rules for the parameters as an engine's optimizer has them: no buffers, tied ones once, torchtitan's fused.

    Raises:
        UsageError: The engine has no names for models of this family.
    """
    found: dict[TensorPart, NameRule] = {}
    taken: set[TensorPart] = set()
    for rule in list_rules(spec, engine):
        is_copy = engine == "torchtitan" and all(part in taken for part in rule.hub)
        if is_copy or rule.hub[0].name.endswith(BUFFERS):
            continue
        taken.update(rule.hub)
        fused = rule.engine._replace(name=SEPARATE_PROJECTION.sub(r"\1.wqkv.", rule.engine.name))
        if fused == rule.engine:
            found[fused] = rule
            continue
        # Query, key and value come in this order in `families/`; only their rotary parts are reordered, alike.
        first = found.get(fused)
        order = PROJECTION_ORDERS[rule.rows] if first is None else first.rows
        found[fused] = NameRule(fused, (*(first.hub if first else ()), *rule.hub), order)
    return list(found.values())


def list_copies(spec: ModelSpec) -> dict[str, str | None]:
    """Tensors that Hugging Face files may have besides those of the model, and of which one they are a copy.

    None where nothing reads them.
    """
    shapes = list_hub_shapes(spec)
    copies = {}
    for pattern, original in choose_family(spec)[1].copies.items():
        for layer in range(spec.num_layers + spec.mtp_num_layers) if "<layer>" in pattern else [0]:
            name = pattern.replace("<layer>", str(layer))
            if name not in shapes:
                copies[name] = original
    return copies


def _fill_rule(
    pattern: str, rule: EngineRule, spec: ModelSpec, shapes: Mapping[str, tuple[int, ...]], prefixes: dict[str, str]
) -> list[NameRule]:
    """A rule for each layer and expert of the model that has its hub tensors."""
    rules = []
    is_layered = "<layer>" in pattern or "<prediction>" in pattern
    for layer in _list_layers(rule.when, spec) if is_layered else [0]:
        for filled, expert in _fill_pattern(_rename_prediction(pattern, layer, spec, prefixes), layer, spec, rule.hub):
            hub = [_parse_part(name, layer, expert) for name in rule.hub]
            if rule.tied and hub[0].name not in shapes:
                hub = [_parse_part(rule.tied, layer, expert)]
            if all(part.name in shapes for part in hub):
                rules.append(NameRule(_parse_part(filled, layer, expert), tuple(hub), rule.rows))
    return rules


def _rename_prediction(pattern: str, layer: int, spec: ModelSpec, prefixes: dict[str, str]) -> str:
    """The pattern in a layer of multi-token prediction, whose names may start otherwise."""
    if layer >= spec.num_layers:
        for start, replaced in prefixes.items():
            if pattern.startswith(start):
                pattern = replaced + pattern.removeprefix(start)
    return pattern.replace("<prediction>", str(layer - spec.num_layers))


def _fill_pattern(pattern: str, layer: int, spec: ModelSpec, others: Sequence[str] = ()) -> Iterator[tuple[str, int]]:
    """Names of one layer, one for each expert where the pattern or the other side of its rule asks for experts."""
    filled = pattern.replace("<layer>", str(layer))
    if not any("expert>" in text or "[expert]" in text for text in (pattern, *others)):
        yield filled, 0
        return
    for expert in range(spec.num_experts or 0):
        yield filled.replace("<expert>", str(expert)), expert


def _parse_part(text: str, layer: int, expert: int) -> TensorPart:
    """A tensor's name; `[expert]` is one expert of a stack, `.T` after it its transpose."""
    name, stacked, rest = text.replace("<layer>", str(layer)).replace("<expert>", str(expert)).partition("[expert]")
    return TensorPart(name, expert if stacked else None, rest == ".T")


def _list_layers(when: list[str], spec: ModelSpec) -> list[int]:
    """Layers in which conditions hold; those of multi-token prediction follow the others, and are like the last one."""
    if not all(_holds(condition, spec) for condition in when if condition not in LAYER_CONDITIONS):
        return []
    kinds = [layer.moe for layer in counts.list_layers(spec)]
    kinds += kinds[-1:] * spec.mtp_num_layers
    layers = range(spec.num_layers if "mtp" in when else 0, len(kinds))
    return [layer for layer in layers if ("dense" in when) <= (not kinds[layer]) and ("moe" in when) <= kinds[layer]]


def _check_complete(rules: list[NameRule], shapes: Mapping[str, tuple[int, ...]], name: str, engine: str) -> None:
    """Every hub tensor has a place in the engine."""
    missing = shapes.keys() - {part.name for rule in rules if rule.rows != "zeros" for part in rule.hub}
    if missing:
        raise UsageError(
            f"{engine}: no name for {min(missing)} of this {name} model", f"{engine} cannot hold such a model"
        )


def _compute_symbols(spec: ModelSpec) -> dict[str, int]:
    """The sizes that shapes in `families/` are made of."""
    heads, head = spec.num_attention_heads, counts.head_dim(spec)
    latent, rotary = spec.kv_lora_rank or 0, spec.qk_pos_emb_head_dim or 0
    return {
        "vocabulary": spec.vocab_size,
        "hidden": spec.hidden_size,
        "two_hidden": 2 * spec.hidden_size,
        "ffn": spec.ffn_hidden_size,
        "two_ffn": 2 * spec.ffn_hidden_size,
        "heads": heads,
        "head": head,
        "query": heads * head,
        "key_value": counts.num_query_groups(spec) * head,
        "query_key_value": (heads + 2 * counts.num_query_groups(spec)) * head,
        "experts": spec.num_experts or 0,
        "expert_ffn": counts.expert_ffn_size(spec),
        "two_expert_ffn": 2 * counts.expert_ffn_size(spec),
        "shared_ffn": spec.moe_shared_expert_intermediate_size or 0,
        "query_latent": spec.q_lora_rank or 0,
        "latent": latent,
        "latent_and_rotary": latent + rotary,
        "latent_keys_and_values": heads * ((spec.qk_head_dim or 0) + counts.value_head_dim(spec)),
        "values": heads * counts.value_head_dim(spec),
    }


def _holds(condition: str, spec: ModelSpec) -> bool:
    negated, _, name = condition.rpartition("not ")
    return CONDITIONS[name or negated](spec) != condition.startswith("not ")


def _order_key(name: str) -> tuple[int, list[int | str]]:
    """Embedding, layers by number, then the rest, as in published files."""
    parts: list[int | str] = [int(part) if part.isdigit() else part for part in name.split(".")]
    if "layers" not in parts:
        return (0 if "embed" in name else 2), [0, name]
    layer = parts[parts.index("layers") + 1]
    return 1, [layer, ".".join(f"{part:06d}" if isinstance(part, int) else part for part in parts)]


def _merge_files(name: str) -> dict[str, Any]:
    read = _read_yaml(FAMILIES / f"{name}.yaml")
    if "extends" not in read:
        return read
    merged = _merge_files(read["extends"])
    for table in ("hub", "copies"):
        merged[table] = {**merged[table], **read.pop(table, {})}
    return {**merged, **read}


def _read_yaml(file: Path) -> dict[str, Any]:
    import yaml  # config has loaded it where there is an experiment

    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    values: dict[str, Any] = yaml.load(file.read_text(encoding="utf-8"), loader)  # noqa: S506
    return values
