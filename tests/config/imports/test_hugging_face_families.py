"""Each family of config.json has the parameters of the model that transformers itself builds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from engine_python import run_engine
from primus.config.imports.foreign_config import make_model
from primus.config.imports.hugging_face import FAMILIES
from primus.config.imports.read_file import read_foreign_file
from primus.models.counts import count_parameters

COUNT = """
import json, os, torch, transformers
from transformers import AutoModel, AutoModelForCausalLM
THINKERS = {"qwen2_5_omni_text": "Qwen2_5OmniThinkerTextModel", "qwen3_omni_moe_text": "Qwen3OmniMoeThinkerTextModel"}
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
counts = []
for values in json.loads(os.environ["FILES"]):
    config = CONFIG_MAPPING[values["model_type"]].from_dict(values)
    text = config.get_text_config()
    is_tied = getattr(config, "tie_word_embeddings", False)
    with torch.device("meta"):
        own_head = 0 if is_tied else text.vocab_size * text.hidden_size
        try:
            if text.model_type in THINKERS:
                raise ValueError
            model, head = AutoModelForCausalLM.from_config(text), 0
        except ValueError:  # the language model of a larger one has no class with a head
            build = getattr(transformers, THINKERS.get(text.model_type, ""), AutoModel)
            model, head = build._from_config(text) if build is not AutoModel else build.from_config(text), own_head
    biases = sum(each.numel() for name, each in model.named_buffers() if "bias" in name)
    counts.append(sum(each.numel() for each in model.parameters()) + head + biases)
print(json.dumps(counts))
"""
"""Counts the parameters, and the biases that balance experts, which transformers does not train."""

SMALL = {"hidden_size": 96, "num_hidden_layers": 5, "vocab_size": 80, "num_attention_heads": 6, "head_dim": 16}
FILES: list[dict[str, Any]] = [
    *({"model_type": name, "num_hidden_layers": 7} for name in sorted(FAMILIES) if name != "lfm2_moe"),
    {"model_type": "lfm2_moe", "num_hidden_layers": 4, "layer_types": ["conv", "conv", "full_attention", "conv"]},
    {"model_type": "llama"},
    SMALL | {"model_type": "mistral", "num_key_value_heads": 3, "sliding_window": None, "head_dim": None},
    SMALL | {"model_type": "qwen3_moe", "num_local_experts": 6, "moe_intermediate_size": 40, "mlp_only_layers": [0]},
    SMALL | {"model_type": "llama4_text", "interleave_moe_layer_step": 2, "num_local_experts": 3},
    SMALL | {"model_type": "gemma3_text", "tie_word_embeddings": False, "intermediate_size": 200},
    SMALL | {"model_type": "lfm2", "block_ff_dim": 301, "num_key_value_heads": 3, "full_attn_idxs": [1, 4]},
    SMALL | {"model_type": "qwen3_5_text", "full_attention_interval": 3, "linear_num_value_heads": 16},
    SMALL | {"model_type": "smollm3", "num_key_value_heads": 2, "pad_token_id": None},
    SMALL | {"model_type": "glm4_moe", "use_qk_norm": True, "attention_bias": True, "first_k_dense_replace": 2},
    SMALL | {"model_type": "seed_oss", "attention_bias": False, "num_key_value_heads": 2},
    SMALL | {"model_type": "phi3", "num_key_value_heads": 2, "sliding_window": 64, "pad_token_id": None},
    {"model_type": "qwen2_5_vl", "vision_config": {"depth": 1}, "hidden_size": 128, "num_hidden_layers": 2},
    {"model_type": "gemma3", "text_config": {"hidden_size": 2560, "num_hidden_layers": 34, "intermediate_size": 10240}},
    {"model_type": "mistral3", "text_config": {"model_type": "ministral3", "num_hidden_layers": 3}},
]
SHARED_LAYERS = {"gemma4_text"}
"""Families whose class by default has layers that primus does not: the import says so."""


@pytest.fixture(scope="module")
def counts() -> list[int]:
    """Parameters of each file, from transformers."""
    found = run_engine("huggingface", COUNT, FILES=json.dumps(FILES))
    return list(json.loads(found.splitlines()[-1]))


@pytest.mark.slow
@pytest.mark.engine("huggingface")
@pytest.mark.parametrize("index", range(len(FILES)), ids=lambda index: f"{index}-{FILES[index]['model_type']}")
def test_parameters_equal_those_of_the_model_that_transformers_builds(
    index: int, counts: list[int], tmp_path: Path
) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(FILES[index]))
    config = read_foreign_file(file, {})
    if FILES[index]["model_type"] in SHARED_LAYERS:
        assert "hidden_size_per_layer_input" in {each.key for each in config.warnings}
        return
    assert count_parameters(make_model(config)).total_parameters == counts[index]
