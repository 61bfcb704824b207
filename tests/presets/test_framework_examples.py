"""The examples at the paths of Primus' guides are valid, and each is the published model."""

from __future__ import annotations

from pathlib import Path

import pytest

from primus.experiment import resolve_experiment
from primus.models.counts import count_parameters

EXAMPLES = Path(__file__).parents[2] / "examples"
FILES = sorted(file for folder in ("megatron", "torchtitan") for file in (EXAMPLES / folder).rglob("*.[yt][ao]ml"))
MODELS = {
    "llama2_7B": 6_738_415_616,
    "llama2_70B": 68_976_648_192,
    "llama3_8B": 8_030_261_248,
    "llama3_70B": 70_553_706_496,
    "llama3.1_8B": 8_030_261_248,
    "llama3.1_70B": 70_553_706_496,
    "llama3.1_405B": 405_853_388_800,
    "deepseek_v2_lite": 15_706_484_224,
    "deepseek_v2": 235_741_434_880,
    "deepseek_v3": 671_026_419_200,
    "mixtral_8x7B_v0.1": 46_702_792_704,
    "mixtral_8x22B_v0.1": 140_620_634_112,
}
"""The models of the guides' table, with their parameters."""


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(EXAMPLES)))
def test_an_example_of_a_framework_is_valid(file: Path) -> None:
    resolved = resolve_experiment(file, (), {})
    assert resolved.experiment.trainer.framework == file.relative_to(EXAMPLES).parts[0]


@pytest.mark.parametrize("model", MODELS)
def test_each_model_of_the_guides_has_an_example(model: str) -> None:
    resolved = resolve_experiment(EXAMPLES / f"megatron/configs/MI300X/{model}-pretrain.yaml", (), {})
    assert count_parameters(resolved.experiment.trainer.model).total_parameters == MODELS[model]


def test_the_examples_stand_at_the_paths_of_both_generations_of_guides() -> None:
    names = {str(file.relative_to(EXAMPLES)) for file in FILES}
    assert {"megatron/configs/llama3_8B-pretrain.yaml", "torchtitan/configs/llama3_8b.toml"} <= names
    assert len(names) >= 12 + 9 + 2
