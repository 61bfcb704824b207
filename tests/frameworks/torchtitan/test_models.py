"""Models that native cannot hold have the losses of transformers: experts, and latent attention."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from engine_python import run_engine
from primus.checkpoint.family import list_hub_shapes
from primus.config.schema import ModelSpec, Trainer, TrainingConfig

from .runs import train_by_engine

pytestmark = [pytest.mark.engine("torchtitan", "huggingface"), pytest.mark.slow]

SEQUENCE, VOCABULARY = 32, 256
LOSS = 2e-5
"""Largest difference of losses, which are near 9; both sides are in float32."""
SHAPE = {
    "num_layers": 2,
    "hidden_size": 64,
    "ffn_hidden_size": 96,
    "num_attention_heads": 4,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 64,
    "num_experts": 4,
    "moe_ffn_hidden_size": 32,
}
LATENT = {
    "multi_latent_attention": True,
    "kv_lora_rank": 16,
    "qk_head_dim": 16,
    "qk_pos_emb_head_dim": 8,
    "v_head_dim": 16,
    "first_k_dense_replace": 1,
    "moe_shared_expert_intermediate_size": 32,
}
HUB_LATENT = {
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "first_k_dense_replace": 1,
    "n_shared_experts": 1,
    "n_routed_experts": 4,
    "moe_intermediate_size": 32,
    "num_experts_per_tok": 2,
}
PLAIN_ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}
YARN = {"factor": 4.0, "original_max_position_embeddings": 32, "mscale": 0.7, "mscale_all_dim": 0.7}
MODELS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "Qwen3Moe": (
        {"num_query_groups": 2, "qk_layernorm": True, "moe_router_norm_topk_prob": True},
        {
            "num_key_value_heads": 2,
            "head_dim": 16,
            "moe_intermediate_size": 32,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "norm_topk_prob": True,
            **PLAIN_ROPE,
        },
    ),
    "Mixtral": (
        {"num_query_groups": 2, "moe_router_pre_softmax": False},
        {
            "num_key_value_heads": 2,
            "intermediate_size": 32,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            **PLAIN_ROPE,
        },
    ),
    "DeepseekV3": (
        {
            **LATENT,
            "q_lora_rank": 32,
            "moe_router_score_function": "sigmoid",
            "moe_router_norm_topk_prob": True,
            "moe_router_enable_expert_bias": True,
            "moe_router_num_groups": 2,
            "moe_router_group_topk": 1,
            "moe_router_topk_scaling_factor": 2.5,
        },
        {
            **HUB_LATENT,
            "q_lora_rank": 32,
            "n_group": 2,
            "topk_group": 1,
            "norm_topk_prob": True,
            "routed_scaling_factor": 2.5,
            "rope_interleave": True,
            **PLAIN_ROPE,
        },
    ),
    "DeepseekV2": (
        {
            **LATENT,
            "rope_type": "yarn",
            "rotary_scaling_factor": 4.0,
            "original_max_position_embeddings": 32,
            "mscale": 0.7,
            "mscale_all_dim": 0.7,
        },
        {
            **HUB_LATENT,
            "q_lora_rank": None,
            "norm_topk_prob": False,
            "routed_scaling_factor": 1.0,
            "topk_method": "greedy",
            "rope_parameters": {"rope_type": "yarn", "rope_theta": 10000.0, "beta_fast": 32, "beta_slow": 1, **YARN},
        },
    ),
    "Llama4": (
        {
            "num_query_groups": 2,
            "no_rope_freq": 2,
            "attention_chunk_size": 8192,
            "moe_layer_freq": 2,
            "moe_router_topk": 1,
            "moe_shared_expert_intermediate_size": 32,
            "moe_router_score_function": "sigmoid",
            "moe_apply_probs_on_input": True,
        },
        {
            "num_key_value_heads": 2,
            "head_dim": 16,
            "intermediate_size": 32,
            "intermediate_size_mlp": 96,
            "num_local_experts": 4,
            "num_experts_per_tok": 1,
            "interleave_moe_layer_step": 2,
            "no_rope_layers": [1, 0],
            "use_qk_norm": False,
            "attn_temperature_tuning": False,
            **PLAIN_ROPE,
        },
    ),
}
CONFIG_CLASSES = {"Llama4": "Llama4TextConfig"}
"""Classes whose name is not that of the model."""
COMPUTE_LOSSES = """
import json, numpy, torch, transformers
for request in json.load(open(FILE)):
    config = getattr(transformers, request["config_class"])(**request["config"], attn_implementation="eager")
    model = getattr(transformers, request["name"] + "ForCausalLM")(config)
    weights = torch.load(request["weights"], weights_only=True)
    model = type(model).from_pretrained(None, config=config, state_dict=weights, attn_implementation="eager").eval()
    tokens = torch.from_numpy(numpy.load(request["tokens"])[0])
    with torch.no_grad():
        logits = model(tokens[:, :-1]).logits
    print("loss", float(torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())))
"""


def draw_weights(spec: ModelSpec) -> dict[str, torch.Tensor]:
    """Weights of an untrained model with a loss far above that of a uniform guess, which any error would change."""
    generator = torch.Generator().manual_seed(3)
    found = {}
    for name, shape in list_hub_shapes(spec).items():
        value = torch.randn(shape, generator=generator)
        if "norm" in name:
            value = 1 + 0.2 * value
        elif name.endswith("bias"):
            value = 0.05 * value
        elif "embed" not in name:
            value = value * 2 / shape[-1] ** 0.5
        found[name] = value
    return found


def fuse_experts(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The experts of Llama 4 as in transformers: one tensor for a layer, gates and what they gate side by side."""
    fused = dict(weights)
    for name in [name for name in weights if name.endswith("feed_forward.experts.0.gate_proj.weight")]:
        start = name.removesuffix("0.gate_proj.weight")
        parts = {
            kind: torch.stack([fused.pop(f"{start}{expert}.{kind}_proj.weight").T for expert in range(4)])
            for kind in ("gate", "up", "down")
        }
        fused[f"{start}gate_up_proj"] = torch.cat([parts["gate"], parts["up"]], -1)
        fused[f"{start}down_proj"] = parts["down"]
    return fused


def test_models_with_experts_and_latent_attention_have_the_losses_of_transformers(tmp_path: Path) -> None:
    tokens = np.random.default_rng(0).integers(0, VOCABULARY, (1, 2, SEQUENCE + 1))
    np.save(tmp_path / "tokens.npy", tokens)
    shared = {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 64,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
    }
    requests, others = [], []
    for name, (parts, config) in MODELS.items():
        spec = ModelSpec(**SHAPE, **parts)
        weights = tmp_path / f"{name}.pt"
        torch.save(draw_weights(spec), weights)
        training = TrainingConfig(
            micro_batch_size=2, global_batch_size=2, seq_length=SEQUENCE, bf16=False, train_iters=1
        )
        fused = tmp_path / f"{name}.fused.pt"
        torch.save(fuse_experts(torch.load(weights)), fused)
        files = {"tokens": str(tmp_path / "tokens.npy"), "weights": str(weights)}
        requests.append((Trainer(model=spec, training=training), {**files, "last": 0, "evaluate": True}))
        config_class = CONFIG_CLASSES.get(name, f"{name}Config")
        files["weights"] = str(fused)
        others.append({"name": name, "config_class": config_class, "config": {**shared, **config}, **files})
    (tmp_path / "requests.json").write_text(json.dumps(others))
    printed = run_engine("huggingface", COMPUTE_LOSSES.replace("FILE", repr(str(tmp_path / "requests.json"))))
    expected = [float(line.split()[1]) for line in printed.splitlines() if line.startswith("loss ")]
    found = train_by_engine(tmp_path / "engine", requests)
    for name, result, loss in zip(MODELS, found, expected, strict=True):
        total, count = result["evaluation"]
        assert loss > np.log(VOCABULARY) + 1
        assert total / count == pytest.approx(loss, abs=LOSS), name
