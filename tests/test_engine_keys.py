"""The rules that say what an engine does with each key."""

from __future__ import annotations

from pathlib import Path

import pytest

import primus
from primus.config.schema import OWNERS, ModelSpec, Trainer, TrainingConfig
from primus.engine_keys import check_key_rules, list_key_differences, read_key_rules
from primus.errors import UsageError

SPEC = ModelSpec(num_layers=1, hidden_size=8, ffn_hidden_size=8, num_attention_heads=1, vocab_size=16)
ENGINES = sorted(file.parent for file in (Path(primus.__file__).parent / "backends").glob("*/keys.yaml"))
RULES = """
num_experts: {refused: mixture-of-experts layers}
rope_type: {field: rope, accepts: [llama3], refused: yarn rope scaling}
recompute_activations: {field: checkpoint, differs: recomputes half of them}
seed: {session: true}
bf16: {field: type, differs: rounds elsewhere}
"""


def build_trainer(**model: object) -> Trainer:
    from msgspec.structs import replace

    return Trainer(model=replace(SPEC, **model), training=TrainingConfig(recompute_activations=True, bf16=False))


@pytest.fixture
def rules(tmp_path: Path):
    (tmp_path / "keys.yaml").write_text(RULES)
    return read_key_rules(tmp_path)


@pytest.mark.parametrize("engine", ENGINES, ids=lambda folder: folder.name)
def test_each_key_of_the_schema_has_a_complete_rule(engine: Path) -> None:
    rules = read_key_rules(engine)
    assert set(rules) == set(OWNERS)
    assert not [key for key, rule in rules.items() if not rule.is_complete]


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
