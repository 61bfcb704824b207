"""The rules that say what an engine does with each key."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import msgspec
import pytest
from msgspec import structs

import primus
from primus import registry
from primus.config.schema import (
    DEFAULTS,
    GROUPS,
    OWNERS,
    DataConfig,
    Experiment,
    ModelSpec,
    OptimizerConfig,
    Trainer,
    TrainingConfig,
)
from primus.engine_keys import (
    KeyRule,
    check_key_rules,
    check_writable,
    list_key_differences,
    list_unwritable_keys,
    read_key_rules,
    write_keys,
)
from primus.errors import UsageError
from primus.framework import FRAMEWORKS
from primus.frameworks.megatron.known_keys import CHECKOUT_KEYS

SPEC = ModelSpec(num_layers=1, hidden_size=8, ffn_hidden_size=8, num_attention_heads=1, vocab_size=16)
ENGINES = sorted(file.parent for file in (Path(primus.__file__).parent / "frameworks").glob("*/keys.yaml"))
RULES = """
lr: {field: rate, files: [optimizer.rate, learning_rate]}
post_layernorm: {refused: norms after layers, unwritable: true}
attention_sinks: {field: sinks, unwritable: sinks outside of its own models}
num_experts: {refused: mixture-of-experts layers}
rope_type: {field: rope, accepts: [llama3], refused: yarn rope scaling}
recompute_activations: {field: checkpoint, differs: recomputes half of them}
seed: {session: true}
bf16: {field: type, differs: rounds elsewhere}
"""


def build_trainer(**model: object) -> Trainer:
    training = TrainingConfig(recompute_activations=True, bf16=False)
    return Trainer(model=structs.replace(SPEC, **model), training=training)


@pytest.fixture
def rules(tmp_path: Path):
    (tmp_path / "keys.yaml").write_text(RULES)
    return read_key_rules(tmp_path)


@pytest.mark.parametrize("engine", ENGINES, ids=lambda folder: folder.name)
def test_each_key_of_the_schema_has_a_complete_rule(engine: Path) -> None:
    rules = read_key_rules(engine)
    assert set(rules) == set(OWNERS)
    assert not [key for key, rule in rules.items() if not rule.is_complete]


def test_a_line_of_an_engine_outranks_its_patterns_which_outrank_the_shared_rules(tmp_path: Path) -> None:
    (tmp_path / "keys.yaml").write_text(
        "num_experts: {field: experts}\nmodel.*: {field: shape}\nmoe_*: {field: router}\nsplit: {refused: splits}\n"
    )
    rules = read_key_rules(tmp_path)
    assert rules["num_experts"].field == "experts"
    assert rules["moe_latent_size"].field == "router"
    assert rules["hidden_size"].field == rules["attention_sinks"].field == "shape"
    assert rules["split"].refused and not rules["split"].session
    assert rules["valid_data_path"].session


def test_a_refused_value_of_a_model_is_not_to_be_set_to_that_of_another_model(rules) -> None:
    with pytest.raises(UsageError) as caught:
        check_key_rules("abacus", rules, build_trainer(rope_type="yarn"))
    assert "rope_type: yarn: abacus does not support yarn rope scaling" in str(caught.value)
    assert caught.value.hint.startswith("choose another framework")
    assert "set rope_type" not in caught.value.hint


def test_the_default_and_the_accepted_values_pass(rules) -> None:
    check_key_rules("abacus", rules, build_trainer())
    check_key_rules("abacus", rules, build_trainer(rope_type="llama3"))


def test_differences_list_refused_settings_first_and_leave_out_those_that_are_off(rules) -> None:
    found = list_key_differences(rules, build_trainer(num_experts=4))
    assert [(each.key, each.is_refused) for each in found] == [("num_experts", True), ("recompute_activations", False)]
    # Off, although it is on by default.
    assert TrainingConfig().bf16
    assert list_key_differences(rules, Trainer(model=SPEC, training=TrainingConfig(bf16=False))) == []


def test_a_file_has_the_newest_name_of_a_key_without_its_section(rules, tmp_path: Path) -> None:
    assert write_keys(tmp_path, OptimizerConfig(lr=0.5), "lr") == {"rate": 0.5}


def test_a_file_does_not_hold_a_model_with_what_its_framework_lacks(rules, tmp_path: Path) -> None:
    check_writable("abacus", tmp_path, build_trainer().model)
    model = build_trainer(post_layernorm=True, attention_sinks=True).model
    lacking = {"attention_sinks": "sinks outside of its own models", "post_layernorm": "norms after layers"}
    assert list_unwritable_keys(tmp_path, model) == lacking
    with pytest.raises(UsageError, match=r"^attention_sinks: True: abacus has no sinks outside of its own models"):
        check_writable("abacus", tmp_path, model, "choose another framework")


def test_each_key_has_the_default_of_its_field() -> None:
    fields = {field.name: field for group in GROUPS.values() for field in structs.fields(group)}
    assert {name: field.default for name, field in fields.items() if not field.required} == DEFAULTS


def list_names(annotation: Any) -> Iterator[Any]:
    """The values of each Literal in a type."""
    for each in get_args(annotation):
        yield from list_names(each) if get_args(each) else [each]


def choose_refused_value(key: str, rule: KeyRule) -> Any:
    """A value of the key's type that the rule does not accept."""
    (field,) = (each for each in structs.fields(GROUPS[OWNERS[key]]) if each.name == key)
    for value in (True, False, 2, 3, 0.5, *list_names(field.type), "x", "M"):
        try:
            valid = msgspec.convert(value, field.type) == value
        except (msgspec.ValidationError, TypeError):
            continue
        if valid and value != field.default and value not in rule.accepts:
            return value
    raise AssertionError(f"no value for {key}")


@pytest.mark.parametrize("device", ["auto", "cpu"])
@pytest.mark.parametrize("engine", ENGINES, ids=lambda folder: folder.name)
def test_each_refused_value_is_refused_before_a_launch(engine: Path, device: str) -> None:
    backend = registry.load_plug_in(FRAMEWORKS, engine.name)
    training = TrainingConfig(device=device)  # type: ignore[arg-type]
    base = Trainer(model=SPEC, framework=engine.name, data=DataConfig(mock_data=True), training=training)
    refused = {key: rule for key, rule in read_key_rules(engine).items() if rule.refused}
    if engine.name == "megatron" and device != "cpu":  # a worker may have a checkout of Megatron-LM
        refused = {key: rule for key, rule in refused.items() if key not in CHECKOUT_KEYS}
    assert len(refused) > 5
    for key, rule in refused.items():
        group = structs.replace(getattr(base, OWNERS[key]), **{key: choose_refused_value(key, rule)})
        with pytest.raises(UsageError, match=f"^{key}: .* does not support") as caught:
            backend.check(Experiment(exp_name="x", trainer=structs.replace(base, **{OWNERS[key]: group})))
        assert rule.refused in str(caught.value)
