"""Settings of `backend_args`: fields of torchtitan's own configuration tree, checked without torchtitan."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any, Literal

from msgspec import Struct

from primus.config.source import flatten_settings, format_yaml_value
from primus.engine_keys import read_key_rules
from primus.errors import UsageError, did_you_mean

MODE = "activation_checkpoint.mode"
"""The class of `activation_checkpoint`, which is not a field in torchtitan's tree."""
MODES = ("none", "full", "selective", "memory_budget")


class FieldType(Struct, frozen=True, forbid_unknown_fields=True):
    """What a field accepts."""

    type: Literal["bool", "int", "float", "str", "list"]
    choices: list[Any] = []
    nullable: bool = False

    def accepts(self, value: Any) -> bool:
        """Whether a value of YAML may be the field's."""
        if value is None:
            return self.nullable
        if self.choices:
            return value in self.choices
        kinds: dict[str, type | tuple[type, ...]] = {
            "bool": bool,
            "int": int,
            "float": (int, float),
            "str": str,
            "list": list,
        }
        return isinstance(value, kinds[self.type]) and (self.type == "bool" or not isinstance(value, bool))

    def format_accepted(self) -> str:
        """What is accepted, for messages."""
        names = {"bool": "true or false", "int": "an integer", "float": "a number", "str": "a text", "list": "a list"}
        what = " or ".join(str(choice) for choice in self.choices) or names[self.type]
        return f"{what} or null" if self.nullable else what


REPLACED = {
    "comm.train_timeout_seconds": "distributed_timeout_minutes",
    "parallelism.pipeline_parallel_microbatch_size": "micro_batch_size",
    "checkpoint": "save, save_interval, keep_last_n, load and finetune",
    "dataloader": "dataset, train_data_path and num_workers",
    "dump_folder": "workspace",
    "hf_assets_path": "tokenizer_model and load",
    "lr_scheduler": "lr_decay_style, lr_warmup_iters, min_lr and the other keys of the schedule",
    "metrics": "log_interval, disable_tensorboard, disable_wandb and disable_mlflow",
    "profiler": "profile",
    "validator": "eval_interval and eval_iters",
}
"""Fields, and parts of the tree, whose work primus does, alike for all engines, and the keys that set it."""


def check_settings(settings: Mapping[str, Any]) -> None:
    """Accept settings of torchtitan's tree that no key of primus sets.

    Raises:
        UsageError: A field does not exist, has another type, or is set by a key of the experiment.
    """
    for path, value in flatten_settings(settings).items():
        found = f"backend_args: {path}: {format_yaml_value(value)}"
        keys = find_replacing_keys(path)
        if keys:
            raise UsageError(f"{found}: primus sets this field", f"use the keys of the experiment: {keys}")
        field = list_field_types().get(path)
        if field is None:
            raise UsageError(
                f"backend_args: torchtitan has no field '{path}'", did_you_mean(path, list(list_field_types()))
            )
        if not field.accepts(value):
            raise UsageError(
                f"{found}: must be {field.format_accepted()}", "docs/engine-torchtitan.md lists the fields"
            )


@cache
def list_field_types() -> dict[str, FieldType]:
    """Type of each field of the tree by its path."""
    from primus.config.source import read_package_yaml  # imports yaml: not for commands that read none

    fields = read_package_yaml(Path(__file__).parent / "fields.yaml", dict[str, FieldType])
    return {**fields, MODE: FieldType("str", list(MODES))}


def find_replacing_keys(path: str) -> str:
    """Keys of the experiment that set a field of the tree; empty if none does."""
    group = path.partition(".")[0]
    if path == MODE:
        return ""
    return (
        REPLACED.get(group)
        or REPLACED.get(path)
        or " and ".join(key for key, field in _list_mapped_fields() if field == path)
    )


def _list_mapped_fields() -> Iterator[tuple[str, str]]:
    for key, rule in read_key_rules(Path(__file__).parent).items():
        yield key, rule.field
