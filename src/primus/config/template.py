"""Generate a commented experiment file for a model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import yaml
from msgspec import structs

from primus.config.docs import read_field_docs
from primus.config.experiment_file import ExperimentFile, ModuleFile
from primus.config.schema import DEFAULTS, GROUPS, Experiment, ModelSpec

LAYOUT_HEADING = "Layout over devices"
SETTINGS: dict[str, tuple[str, ...]] = {
    "Data": ("mock_data", "train_data_path", "dataset", "tokenizer_type", "tokenizer_model", "split"),
    "Length, batch and precision": (
        "train_iters",
        "seq_length",
        "micro_batch_size",
        "global_batch_size",
        "bf16",
        "recompute_activations",
        "seed",
    ),
    "Optimizer and learning rate": (
        "lr",
        "min_lr",
        "lr_decay_style",
        "lr_warmup_iters",
        "weight_decay",
        "adam_beta1",
        "adam_beta2",
        "clip_grad",
    ),
    LAYOUT_HEADING: (
        "tensor_model_parallel_size",
        "pipeline_model_parallel_size",
        "context_parallel_size",
        "use_distributed_optimizer",
    ),
    "Evaluation, checkpoints and reports": (
        "eval_interval",
        "eval_iters",
        "save_interval",
        "keep_last_n",
        "auto_continue_train",
        "load",
        "log_interval",
        "disable_tensorboard",
        "disable_wandb",
        "disable_mlflow",
    ),
}
"""Settings of a starting file by heading; all others keep their defaults and are in the reference."""

SHORT_SEQUENCE = 4096


SHAPE = (
    *("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_query_groups", "kv_channels"),
    *("vocab_size", "max_position_embeddings", "untie_embeddings_and_output_weights", "rotary_base"),
)
"""Keys of the model that a starting file shows as comments, with the values of the preset."""


def format_starting_file(
    model_name: str,
    spec: ModelSpec,
    docs: Mapping[str, str] | None = None,
    *,
    preset: str | None = "",
    values: Mapping[str, Any] | None = None,
    framework: str = "native",
    notes: Sequence[str] = (),
) -> str:
    """An experiment file that pre-trains `model_name` on random tokens; a comment above each key explains it.

    Args:
        model_name: Name of the model.
        spec: The model.
        docs: Meaning of each key; the schema's own docstrings when None.
        preset: File of the model; that of the preset `model_name` when empty, and the keys themselves when None.
        values: Settings with other values than usual, such as weights to start from; those of no heading are listed
            with the layout.
        framework: Name of the framework.
        notes: Lines of comments below the first one.
    """
    docs = collect_key_docs() if docs is None else docs
    size = f"{spec.num_layers} layers, hidden size {spec.hidden_size}, vocabulary {spec.vocab_size}"
    lines = [
        f"# Pre-training of {model_name}: {size}.",
        "# It runs as it is, on random tokens. For real text, remove mock_data and name your data.",
        *(f"# {note}".rstrip() for note in notes),
        *_format_top_lines(model_name, docs),
        "",
        "modules:",
        "  pre_trainer:",
        *_format_entry("framework", framework, docs, indent=4),
        *_format_entry("model", f"{model_name}.yaml" if preset == "" else preset, docs, indent=4),
        f"    # {docs['overrides']}",
        "    overrides:",
    ]
    chosen = _choose_values(spec) | dict(values or {})
    others = [key for key in values or () if not any(key in keys for keys in SETTINGS.values()) and key != "finetune"]
    for heading, keys in SETTINGS.items():
        lines += ["", f"      # -- {heading} --"]
        more = ["finetune"] if "load" in keys and chosen["finetune"] else []
        more += others if heading == LAYOUT_HEADING else []
        for key in (*keys, *more):
            lines += _format_entry(key, chosen[key], docs, indent=6)
    lines += ["", *_format_shape(spec, is_preset=preset is not None)]
    return "\n".join(lines) + "\n"


def _format_shape(spec: ModelSpec, is_preset: bool) -> Iterable[str]:
    """The model: as comments where a preset describes it, else every key that is not at its default."""
    if is_preset:
        yield "      # -- Model (as the preset has it; another value is another model) --"
        yield from (f"      # {key}: {_format_scalar(getattr(spec, key))}" for key in SHAPE)
        return
    yield "      # -- Model --"
    for field in structs.fields(ModelSpec):
        value = getattr(spec, field.name)
        if field.required or value != field.default:
            yield f"      {field.name}: {_format_scalar(value)}"


def collect_key_docs() -> dict[str, str]:
    """Meaning of every key of an experiment file and of its overrides."""
    docs: dict[str, str] = {}
    for struct in (ExperimentFile, ModuleFile, *GROUPS.values()):
        docs |= read_field_docs(struct)
    return docs


def _format_top_lines(model_name: str, docs: Mapping[str, str]) -> Iterable[str]:
    team, user = (field.default for field in structs.fields(Experiment)[:2])
    values = {
        "work_group": f"${{PRIMUS_TEAM:{team}}}",
        "user_name": f"${{USER:{user}}}",
        "exp_name": f"{model_name}-pretrain",
        "workspace": "./output",
    }
    for key, value in values.items():
        yield from ("", *_format_entry(key, value, docs, indent=0))


def _choose_values(spec: ModelSpec) -> dict[str, object]:
    """Defaults of the schema, with the values that make the file runnable without changes."""
    return DEFAULTS | {"mock_data": True, "seq_length": min(SHORT_SEQUENCE, spec.max_position_embeddings)}


def _format_entry(key: str, value: Any, docs: Mapping[str, str], indent: int) -> list[str]:
    """A comment with the meaning of a key, followed by the key with its value."""
    margin = " " * indent
    return [f"{margin}# {docs[key]}", f"{margin}{key}: {_format_scalar(value)}"]


def _format_scalar(value: Any) -> str:
    """`value` as YAML writes it on one line."""
    return yaml.safe_dump(value).removesuffix("...\n").strip()
