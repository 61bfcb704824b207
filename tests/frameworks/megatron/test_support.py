"""What the megatron backend refuses, without megatron-core and without torch."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
from msgspec.structs import replace

from primus.config.schema import Experiment, ModelSpec, Trainer, TrainingConfig
from primus.errors import UsageError
from primus.frameworks.megatron.backend_settings import (
    check_setting_effects,
    group_settings,
    list_unused_settings,
    read_settings,
)
from primus.frameworks.megatron.support import check

SPEC = ModelSpec(num_layers=4, hidden_size=64, ffn_hidden_size=128, num_attention_heads=8, vocab_size=512)
LATENT = {
    "multi_latent_attention": True,
    "kv_lora_rank": 16,
    "qk_head_dim": 8,
    "qk_pos_emb_head_dim": 8,
    "v_head_dim": 8,
}


def build_experiment(**changes: Any) -> Experiment:
    """An experiment on the CPU; `changes` are groups of the trainer."""
    trainer = Trainer(framework="megatron", model=SPEC, training=TrainingConfig(device="cpu", seq_length=64))
    for group, values in changes.items():
        new = values if group == "backend_args" else replace(getattr(trainer, group), **values)
        trainer = replace(trainer, **{group: new})
    return Experiment(exp_name="test", trainer=trainer)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": {"hybrid_layer_pattern": "M*"}}, "hybrid_layer_pattern: M*: megatron does not support"),
        ({"model": {"post_layernorm": True}}, "post_layernorm: true: megatron does not"),
        ({"model": {"rope_type": "yarn"}}, "rope_type: yarn: megatron supports it only with multi_latent_attention"),
        ({"model": LATENT}, "multi_latent_attention: true: megatron supports it only with Transformer Engine"),
        ({"model": {"window_size": 32}}, "window_size: 32: megatron supports it only with Transformer Engine"),
        ({"training": {"fp8": "hybrid"}}, "fp8: hybrid: megatron supports it only with Transformer Engine"),
        (
            {"backend_args": {"fp4": "e2m1", "fp4_recipe": "nvfp4"}},
            "fp4: e2m1: megatron supports it only with Transfor",
        ),
        ({"parallel": {"context_parallel_size": 2}}, "context_parallel_size: 2: megatron supports it only with"),
        ({"training": {"compile": True}}, "compile: true: megatron does not support"),
        ({"data": {"reset_position_ids": True}}, "reset_position_ids: true: megatron does not support"),
        (
            {"backend_args": {"make_vocab_size_divisible_by": 0}},
            "make_vocab_size_divisible_by: 0: must be an integer of at least 1",
        ),
        ({"parallel": {"pipeline_model_parallel_size": 3}}, "pipeline_model_parallel_size: 3"),
        (
            {"model": {"num_experts": 4}, "parallel": {"tensor_model_parallel_size": 2}},
            "sequence_parallel: false: megatron trains experts with tensor parallelism only if the sequence is split",
        ),
        ({"backend_args": {"moe_z_los_coeff": 1e-3}}, "megatron has no setting 'moe_z_los_coeff'"),
        ({"backend_args": {"moe_z_loss_coeff": "high"}}, "moe_z_loss_coeff: high: must be a number"),
        ({"data": {"dataloader": "engine", "mock_data": True}}, "mock_data: true: the samples of dataloader: engine"),
        ({"data": {"dataloader": "engine", "fim_rate": 0.5}}, "fim_rate: 0.5: the samples of dataloader: engine"),
        ({"training": {"nonfinite_policy": "rewind"}}, "nonfinite_policy: rewind: megatron does not support rewinds"),
    ],
)
def test_an_unsupported_value_is_refused_by_its_key(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError) as caught:
        check(build_experiment(**changes))
    assert message in str(caught.value)
    assert caught.value.hint


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"model": {"rope_type": "llama3", "original_max_position_embeddings": 32, "rotary_scaling_factor": 4.0}},
        {"model": {"num_experts": 4, "moe_router_norm_topk_prob": True}},
        {"parallel": {"tensor_model_parallel_size": 2, "sequence_parallel": True}},
        {"model": {"vocab_size": 511}, "parallel": {"tensor_model_parallel_size": 2}},
        {"parallel": {"pipeline_model_parallel_size": 2}},
        {"backend_args": {"moe_z_loss_coeff": 1e-3, "overlap_grad_reduce": True}},
        {"backend_args": {"make_vocab_size_divisible_by": 1}},
        {"data": {"dataloader": "engine"}, "training": {"init": "engine"}, "optimizer": {"schedule": "engine"}},
    ],
)
def test_what_it_trains_is_accepted(changes: dict[str, Any]) -> None:
    check(build_experiment(**changes))


def test_the_check_imports_no_tensor_library() -> None:
    code = (
        "import sys; from frameworks.megatron.test_support import build_experiment, check; check(build_experiment());"
        " print([name for name in ('torch', 'numpy', 'megatron.core') if name in sys.modules])"
    )
    found = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env={"PYTHONPATH": "src:tests"}
    )
    assert found.stdout.strip() == "[]"


def test_settings_reach_the_object_whose_field_they_name() -> None:
    settings = {"bias_swiglu_fusion": True, "overlap_param_gather": True, "moe_z_loss_coeff": None}
    groups = group_settings(settings, ["gpu"])
    assert groups["transformer"] == {"bias_activation_fusion": True}
    assert groups["ddp"] == groups["optimizer"] == {"overlap_param_gather": True}


def test_functions_of_transformer_engine_are_used_only_where_it_is() -> None:
    """Nine of ten of Primus' files for Megatron choose some, which would raise in the first step."""
    settings = {"cross_entropy_fusion_impl": "te", "moe_permute_fusion": True, "gradient_accumulation_fusion": False}
    assert list_unused_settings(settings, ["gpu"]) == ["cross_entropy_fusion_impl", "moe_permute_fusion"]
    assert group_settings(settings, ["gpu"])["transformer"] == {"gradient_accumulation_fusion": False}
    own = {"cross_entropy_fusion_impl": "native"}
    assert list_unused_settings(own, []) == []
    assert list_unused_settings(settings, ["gpu", "transformer_engine"]) == []


@pytest.mark.parametrize(
    ("asked", "own"),
    [({"hidden_dropout": 0.1}, 0.0), ({"normalization": "LayerNorm"}, "RMSNorm"), ({"swiglu": False}, True)],
)
def test_a_default_of_megatron_lm_that_is_not_ours_is_refused_where_it_is_written(asked: Any, own: Any) -> None:
    (name,) = asked
    with pytest.raises(UsageError, match=f"backend_args: {name}: "):
        check_setting_effects(asked)
    check_setting_effects({name: own})


def test_all_settings_that_only_megatron_lm_has_are_in_one_message() -> None:
    settings = {"use_precision_aware_optimizer": True, "exp_avg_dtype": "bf16"}
    with pytest.raises(UsageError, match="use_precision_aware_optimizer: true, exp_avg_dtype: bf16: megatron-core"):
        check_setting_effects(settings)
    check_setting_effects(dict.fromkeys(settings))


@pytest.mark.engine("megatron")
def test_each_field_of_keys_and_settings_exists_in_megatron_core() -> None:
    from primus.engine_keys import read_key_rules
    from primus.frameworks.megatron.support import FOLDER

    from .test_parity import run_code

    printed = run_code(
        "import dataclasses\n"
        "from megatron.core.distributed import DistributedDataParallelConfig as ddp\n"
        "from megatron.core.optimizer import OptimizerConfig as optimizer\n"
        "from megatron.core.transformer.transformer_config import MLATransformerConfig as mla\n"
        "from megatron.core.transformer.transformer_config import TransformerConfig as transformer\n"
        "for name in ('ddp', 'optimizer', 'mla', 'transformer'):\n"
        "    print(*(f'{name}.{field.name}' for field in dataclasses.fields(globals()[name])))\n",
    )
    fields = set(printed.split())
    named = [rule.field for rule in read_key_rules(FOLDER).values()] + [each.field for each in read_settings().values()]
    checked = [field for field in named if field.startswith(("ddp.", "optimizer.", "mla.", "transformer."))]
    assert len(checked) > 50
    assert not [field for field in checked if field not in fields]
