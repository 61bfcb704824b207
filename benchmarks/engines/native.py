"""primus' own backend, called as its trainer calls it."""

from __future__ import annotations

import torch

from engines.setting import BETAS, CLIP, EPSILON, LEARNING_RATE, SEED, WEIGHT_DECAY, Setting
from primus.config.schema import ModelSpec, OptimizerConfig
from primus.frameworks.native.engine.model import build_model
from primus.frameworks.native.engine.optimizer import build_optimizer
from primus.frameworks.native.engine.step import prepare_model, train_step

PACKAGES = ["torch"]


def make(setting: Setting):
    config = OptimizerConfig(
        lr=LEARNING_RATE,
        weight_decay=WEIGHT_DECAY,
        adam_beta1=BETAS[0],
        adam_beta2=BETAS[1],
        adam_eps=EPSILON,
        clip_grad=CLIP,
    )
    model = build_model(build_spec(setting), setting.device, SEED)
    model.compute_dtype = torch.bfloat16 if setting.bf16 else None
    trainable = prepare_model(model, device=setting.device, compile=setting.compile)
    optimizer = build_optimizer(model, config)

    def step(tokens, targets) -> float:
        batches = [(tokens, targets)]
        return train_step(trainable, optimizer, batches, learning_rate=LEARNING_RATE, clip_grad=CLIP).loss

    return step, sum(parameter.numel() for parameter in model.parameters())


def build_spec(setting: Setting) -> ModelSpec:
    return ModelSpec(
        num_layers=setting.layers,
        hidden_size=setting.dim,
        ffn_hidden_size=setting.ffn,
        num_attention_heads=setting.heads,
        num_query_groups=setting.groups,
        vocab_size=setting.vocab,
        norm_epsilon=setting.norm_epsilon,
        rotary_base=setting.rope_theta,
        num_experts=setting.experts,
        moe_router_topk=setting.experts_of_token,
    )
