"""Help, JSON Schema and the reference page come from the schema, and agree with what the loader takes."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from experiment_examples import EXPERIMENTS
from primus.config import reference
from primus.config.docs import read_field_docs, read_summary
from primus.config.experiment_file import ExperimentFile, ModuleFile
from primus.config.load import TOP_KEYS
from primus.config.schema import GROUPS, OWNERS, Experiment, Trainer
from primus.config.source import read_yaml, strip_origins

ROOT = Path(__file__).parents[2]
PAGE = "../../docs/reference/configuration.md"
"""The reference page, seen from tests/golden."""
STRUCTS = [*GROUPS.values(), Experiment, ExperimentFile, ModuleFile, Trainer]


@pytest.fixture(scope="module")
def validator() -> Any:
    schema = reference.format_json_schema()
    jsonschema.Draft202012Validator.check_schema(schema)
    return jsonschema.Draft202012Validator(schema)


def validate(value: dict[str, Any], framework: str | None = None) -> bool:
    return jsonschema.Draft202012Validator(reference.format_json_schema(framework)).is_valid(value)


@pytest.mark.parametrize(
    ("framework", "overrides", "other"),
    [
        ("megatron", {"ckpt_format": "torch", "fp16": False, "enable_primus_turbo": True}, "torchtitan"),
        ("torchtitan", {"parallelism": {"tensor_parallel_degree": 2}, "job": None}, "native"),
        ("maxtext", {"remat_policy": "full", "per_device_batch_size": 2}, "huggingface"),
        ("megatron_bridge", {"finetune_lr": 1e-5, "precision_config": "bf16_mixed"}, "maxtext"),
    ],
)
def test_the_json_schema_of_a_framework_has_its_settings(framework: str, overrides: dict[str, Any], other: str) -> None:
    value = experiment(**overrides)
    assert validate(value, framework) and validate(value)
    assert not validate(value, other)


def test_what_a_file_extends_may_hold_what_it_lacks() -> None:
    assert validate({"extends": "base.yaml"})
    assert validate({"extends": ["a.yaml"], "modules": {"pre_trainer": {"overrides": {"lr": 1e-4}}}})
    assert not validate({"modules": {"pre_trainer": {"overrides": {"lr": 1e-4}}}})
    assert not validate({"exp_name": "x"})
    assert not validate({"extends": "base.yaml", "mudules": {}})


def test_variables_and_blocks_of_primus_are_no_errors_in_an_editor() -> None:
    assert validate(experiment(HSA_NO_SCRATCH_RECLAIM=1) | {"platform": {"config": "x"}, "peft": {"dim": 8}})
    assert not validate(experiment(HSA=1))


def experiment(**overrides: Any) -> dict[str, Any]:
    return {"exp_name": "x", "modules": {"pre_trainer": {"model": "tiny.yaml", "overrides": overrides}}}


@pytest.mark.parametrize("struct", STRUCTS, ids=lambda struct: struct.__name__)
def test_every_key_says_in_a_sentence_what_it_means(struct: type) -> None:
    docs = read_field_docs(struct)
    assert read_summary(struct).endswith(".")
    for name in struct.__struct_fields__:
        assert docs.get(name, "").rstrip("`)").endswith((".", "...")), f"{struct.__name__}.{name}"


def test_each_key_belongs_to_one_group_and_to_no_level_above() -> None:
    names = [name for group in GROUPS.values() for name in group.__struct_fields__]
    assert len(names) == len(set(names))
    assert not set(names) & {*TOP_KEYS, "env", "extends", "modules", "framework", "config", "overrides", "backend_args"}


@pytest.mark.parametrize("path", EXPERIMENTS, ids=lambda path: path.stem)
def test_the_json_schema_accepts_every_example(validator: Any, path: Path) -> None:
    validator.validate(strip_origins(read_yaml(path, environ=None)))


@pytest.mark.parametrize("framework", ["native", "megatron", "torchtitan"])
def test_the_schema_of_a_framework_accepts_its_examples(framework: str) -> None:
    own = jsonschema.Draft202012Validator(reference.format_json_schema(framework))
    every = jsonschema.Draft202012Validator(reference.format_json_schema())
    found = 0
    for path in sorted((ROOT / "examples").rglob("*.yaml")):
        tree = strip_origins(read_yaml(path, environ=None))
        modules = tree.get("modules") or {}
        if framework in {module.get("framework", "native") for module in modules.values()} and "plug-ins" not in str(
            path
        ):
            own.validate(tree)
            every.validate(tree)
            found += 1
    assert found >= 1


@pytest.mark.parametrize(
    "value",
    [
        experiment(lr=1, bf16=False, global_batch_size=None, compile="auto"),
        experiment(lr="${LR:1e-4}", train_iters="${N}"),
        experiment(bf16=1, compile=0, eval_iters=0, save_interval=0, mtp_num_layers=None),
        experiment(train_data_path=[0.5, "a", 0.5, "b"], backend_args={"anything": [1]}),
        {"modules": {"sft_trainer": {"model": "tiny"}}, "extends": ["a.yaml"], "env": {"A": "1"}},
    ],
)
def test_the_json_schema_accepts_what_the_loader_accepts(validator: Any, value: dict[str, Any]) -> None:
    validator.validate(value)


@pytest.mark.parametrize(
    "value",
    [
        experiment(lrr=1),
        experiment(lr="fast"),
        experiment(train_iters=0),
        experiment(train_iters=None),
        experiment(bf16=2),
        experiment(lr_decay_style="cosin"),
        {"modules": {"pretrainer": {"model": "tiny"}}},
        {"modules": {"pre_trainer": {"model": "tiny", "lr": 1}}},
        {"modules": {"pre_trainer": {}}},
        {"exp_name": "x"},
        experiment() | {"lr": 1},
    ],
)
def test_the_json_schema_refuses_what_the_loader_refuses(validator: Any, value: dict[str, Any]) -> None:
    assert not validator.is_valid(value)


def test_the_reference_page_is_current(golden: Callable[[str, str], None]) -> None:
    golden(PAGE, reference.format_markdown() + "\n")


def test_the_reference_names_every_key_once() -> None:
    page = reference.format_markdown()
    assert {name: page.count(f"\n| `{name}` |") for name in OWNERS} == dict.fromkeys(OWNERS, 1)
    assert all(len(re.findall(r"(?<!\\)\|", line)) == 5 for line in page.splitlines() if line.startswith("|"))


@pytest.mark.parametrize(
    ("key", "shown"),
    [
        ("train_iters", "integer >= 1"),
        ("global_batch_size", "integer >= 1 or null"),
        ("lr", "number > 0 and <= 1000"),
        ("adam_beta1", "number >= 0 and < 1"),
        ("lr_warmup_fraction", "number >= 0 and <= 1 or null"),
        ("compile", "boolean or `auto`"),
        ("lr_decay_style", "`WSD` or `constant` or `cosine` or `linear`"),
        ("train_data_path", "string or list or null"),
        ("dataset", "string or null"),
    ],
)
def test_a_type_is_named_as_people_read_it(key: str, shown: str) -> None:
    kinds = {field.name: field.type for field in _fields(GROUPS[OWNERS[key]])}
    assert set(reference.type_name(kinds[key]).split(" or ")) == set(shown.split(" or "))


def _fields(struct: Any) -> Any:
    from msgspec import structs

    return structs.fields(struct)
