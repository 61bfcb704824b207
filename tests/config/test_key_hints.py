"""What is said about a key that another framework has: the key of ours, or whose setting it is; else nothing wrong."""

from __future__ import annotations

import re

import pytest

from primus.config.experiment_file import MODULE_KEYS, TOP_KEYS
from primus.config.foreign_keys import list_synonyms, read_foreign_keys
from primus.config.key_hints import (
    build_unknown_keys_error,
    build_unknown_section_error,
    find_engine,
    find_synonym_hint,
)
from primus.config.schema import OWNERS
from primus.config.source import Leaf, Tree


def problem(key: str, item: Leaf | Tree | None = None) -> str:
    return build_unknown_keys_error({key: item or Leaf(1, f"--{key}")}, OWNERS).problem


@pytest.mark.parametrize(
    ("key", "ours"),
    [
        ("learning_rate", "lr"),
        ("learning-rate", "lr"),
        ("max_steps", "train_iters"),
        ("tp_size", "tensor_model_parallel_size"),
        ("tp", "tensor_model_parallel_size"),
        ("precision", "bf16"),
        ("batch_size", "micro_batch_size"),
        ("seq_len", "seq_length"),
        ("epochs", "train_iters"),
        ("warmup_steps", "lr_warmup_iters"),
        ("per_device_train_batch_size", "micro_batch_size"),
        ("n_embd", "hidden_size"),
        ("layernorm_epsilon", "norm_epsilon"),
        ("output_dir", "workspace"),
    ],
)
def test_a_key_of_another_framework_gets_ours(key: str, ours: str) -> None:
    assert f"unknown key '{key}'; use {ours}" in problem(key)


@pytest.mark.parametrize(
    ("group", "key", "hint"),
    [
        ("training", "steps", "training.steps: use train_iters"),
        ("parallelism", "tensor_parallel_degree", "use tensor_model_parallel_size"),
        ("optimizer_settings", "lr", "keys stand directly under 'overrides:', not in groups: lr"),
        ("training", "nothing", "keys stand directly under 'overrides:', not in groups"),
        ("metrics", "log_freq", "metrics.log_freq: use log_interval"),
        ("quantize", "linear", "it is a setting of torchtitan"),
    ],
)
def test_a_group_of_keys_gets_the_key_that_stands_directly(group: str, key: str, hint: str) -> None:
    assert hint in problem(group, {key: Leaf(1, "e.yaml:3")})


@pytest.mark.parametrize(
    ("key", "item"), [("lora", Tree({"rank": Leaf(8, "e.yaml:3")})), ("lora_r", None), ("peft", None)]
)
def test_a_feature_that_no_engine_has_is_named(key: str, item: Tree | None) -> None:
    assert f"unknown key '{key}'; native and megatron_bridge train adapters" in problem(key, item)


@pytest.mark.parametrize(
    "key", ["no_load_rng", "no_save_optim", "ckpt_format", "overlap_grad_reduce", "use_turbo_attention", "nccl_ub"]
)
def test_a_key_of_an_engine_gets_no_key_of_ours(key: str) -> None:
    assert "did you mean" not in problem(key)
    assert "it is a setting of " in problem(key)


@pytest.mark.parametrize("key", ["zebra", "x", "kda_backend", "my_special_flag", "guidance_scale"])
def test_a_key_that_is_near_none_gets_no_advice(key: str) -> None:
    assert problem(key) == f"--{key}: unknown key '{key}'"


@pytest.mark.parametrize(
    ("key", "ours"),
    [("train_iter", "train_iters"), ("sead", "seed"), ("seqlength", "seq_length"), ("exp_nam", "exp_name")],
)
def test_a_misspelt_key_gets_the_nearest(key: str, ours: str) -> None:
    assert problem(key).endswith(f"; did you mean '{ours}'?")


def test_each_synonym_names_keys_that_there_are() -> None:
    known = {*OWNERS, *TOP_KEYS, *MODULE_KEYS}
    for name, use in list_synonyms().items():
        first = re.split(r"[ ,(:]", use)[0]
        assert first in known or first in ("nothing", "--nproc"), f"{name}: {use}"
        assert find_synonym_hint(name) == f"use {use}"


def test_no_setting_of_an_engine_hides_a_synonym() -> None:
    for engine, names in read_foreign_keys().engine_keys.items():
        assert engine == "torchtitan" or not set(names.split()) & list_synonyms().keys(), (
            "its names are those of groups"
        )
    assert find_engine("nobody_has_this") == ""


def test_adapters_beside_the_modules_get_the_place_where_they_have_an_effect() -> None:
    item = {"dim": Leaf(16, "exp.yaml:3")}
    error = build_unknown_section_error("lora", item, TOP_KEYS, "experiment file", "overrides")
    assert error.problem == "exp.yaml:3: unknown key 'lora' in the experiment file"
    assert "no effect in Primus" in error.hint
    assert "peft: lora under 'overrides:'" in error.hint
