"""What the backend `maxtext` accepts, and the configuration that an experiment becomes; needs no MaxText."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from primus.errors import UsageError
from primus.experiment import resolve_experiment
from primus.frameworks.maxtext.engine.weights import list_places
from primus.frameworks.maxtext.names import MODELS
from primus.frameworks.maxtext.settings import build_settings, write_model

QUICKSTART = Path(__file__).parents[3] / "examples/quickstart.yaml"


def resolve(*words: str) -> Any:
    return resolve_experiment(QUICKSTART, ("--framework", "maxtext", *words), {}).experiment.trainer


def test_the_quick_start_becomes_a_llama_of_maxtext() -> None:
    trainer = resolve("--weight_decay", "0.2")
    settings = build_settings(trainer, Path("out"), on_cpu=True, batch_per_device=8, num_micro_batches=2)
    assert settings["decoder_block"] == "llama2" and settings["base_emb_dim"] == 256
    assert (settings["attention"], settings["dtype"], settings["logits_via_embedding"]) == ("dot_product", "float32", 1)
    assert (settings["per_device_batch_size"], settings["gradient_accumulation_steps"]) == (8, 2)
    assert settings["adam_weight_decay"] == 0.2 and ".*norm.*" in settings["adamw_mask"]
    assert (settings["ici_fsdp_parallelism"], settings["ici_data_parallelism"]) == (-1, 1)


def test_a_setting_of_maxtext_alone_reaches_it() -> None:
    trainer = resolve("--num_vocab_tiling", "4")
    assert build_settings(trainer, Path("out"), True, 8, 1)["num_vocab_tiling"] == 4


def test_experts_start_from_weights_of_primus_and_have_one_width() -> None:
    words = ("--num_experts", "4", "--moe_router_topk", "2", "--moe_ffn_hidden_size", "96")
    settings = build_settings(resolve(*words, "--qk_layernorm", "true"), Path("out"), True, 8, 1)
    assert settings["decoder_block"] == "qwen3_moe"
    assert settings["base_mlp_dim"] == settings["base_moe_mlp_dim"] == 96


@pytest.mark.parametrize(
    ("words", "changed"),
    [
        (("mixtral-8x7b", "--num_attention_heads", "8"), {"base_num_query_heads": 8, "head_dim": 512}),
        (("mixtral-8x7b", "--moe_ffn_hidden_size", "48"), {"base_mlp_dim": 48, "base_moe_mlp_dim": 48}),
        (("deepseek2-16b", "--num_attention_heads", "4"), {"base_num_query_heads": 4, "base_num_kv_heads": 4}),
    ],
)
def test_a_changed_size_of_a_model_of_maxtext_changes_those_that_follow(
    tmp_path: Path, words: tuple[str, ...], changed: dict[str, int]
) -> None:
    file = tmp_path / "e.yaml"
    override = f"{{framework: maxtext, model: {words[0]}.yaml, overrides: {{mock_data: true, model_name: {words[0]}}}}}"
    file.write_text(f"modules: {{pre_trainer: {override}}}\n".replace(f"{words[0]}.yaml", MODELS[words[0]] + ".yaml"))
    model = write_model(resolve_experiment(file, words[1:], {}).experiment.trainer)
    assert model == {"model_name": words[0], "override_model_config": True} | changed


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--pipeline_model_parallel_size", "2"), "pipeline parallelism"),
        (("--context_parallel_size", "2"), "context parallelism"),
        (("--window_size", "64"), "sliding"),
        (("--rope_type", "llama3", "--rotary_scaling_factor", "32"), "constants of Llama 3.1"),
        (("--nonfinite_policy", "rewind"), "rewind"),
        (("--compile", "false"), "compiles each step"),
        (("--num_experts", "4", "--moe_router_topk", "2", "--first_k_dense_replace", "1"), "set init: engine"),
        (("--backend_args.steps", "4"), "train_iters"),
        (("--backend_args.scan_layer", "true"), "scan_layers"),
        (("--backend_args.scan_layers", "yes please"), "type"),
    ],
)
def test_what_maxtext_cannot_train_is_refused_with_the_reason(words: tuple[str, ...], said: str) -> None:
    with pytest.raises(UsageError) as error:
        resolve(*words)
    assert said in f"{error.value} {error.value.hint}"


@pytest.mark.parametrize(
    ("name", "shape", "hub_shape"),
    [
        ("decoder.layers.self_attention.query.kernel", (6, 2, 4, 8), (32, 6)),
        ("decoder.layers.self_attention.out.kernel", (4, 2, 8, 6), (6, 32)),
        ("decoder.layers.self_attention.key.bias", (3, 2, 8), (24,)),
        ("decoder.layers.mlp.wo.kernel", (10, 2, 6), (6, 10)),
        ("decoder.layers_1.pre_self_attention_layer_norm.scale", (6,), (6,)),
        ("decoder.layers.moe_block.gate.kernel", (6, 2, 4), (4, 6)),
        ("decoder.layers.moe_block.wi_0", (4, 2, 6, 10), (10, 6)),
        ("decoder.layers_1.MoeBlock_0.wo", (4, 10, 6), (6, 10)),
        ("decoder.logits_dense.kernel", (6, 20), (20, 6)),
        ("token_embedder.embedding", (20, 6), (20, 6)),
    ],
)
def test_a_weight_comes_back_from_the_layout_of_maxtext(
    name: str, shape: tuple[int, ...], hub_shape: tuple[int, ...]
) -> None:
    for is_interleaved in (False, True):
        for place in list_places(name, shape, 1, is_interleaved=is_interleaved, query_factor=0.25):
            values = np.arange(np.prod(hub_shape), dtype=np.float32).reshape(hub_shape)
            assert place.hub_shape == hub_shape
            assert place.to_maxtext(values).shape == place.shape
            np.testing.assert_array_equal(place.to_hub(place.to_maxtext(values)), values)


def test_rope_on_neighbors_has_the_halves_of_a_head_in_turn() -> None:
    place = list_places(
        "decoder.layers.self_attention.key.kernel", (1, 1, 1, 4), 1, is_interleaved=True, query_factor=1
    )
    assert place[0].to_maxtext(np.array([[0], [1], [2], [3]])).ravel().tolist() == [0, 2, 1, 3]
