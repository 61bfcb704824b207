"""litgpt's GPT with the loss of its pretrain.py: autocast for bf16 (Fabric's bf16-mixed), the whole model compiled."""

from __future__ import annotations

import torch
from litgpt import GPT, Config
from litgpt.utils import chunked_cross_entropy

from engines.setting import BETAS, CLIP, EPSILON, LEARNING_RATE, SEED, WEIGHT_DECAY, Setting

PACKAGES = ["torch", "litgpt"]


def make(setting: Setting):
    torch.manual_seed(SEED)
    config = Config(
        name="benchmark",
        block_size=setting.sequence,
        vocab_size=setting.vocab,
        padded_vocab_size=setting.vocab,
        n_layer=setting.layers,
        n_head=setting.heads,
        n_query_groups=setting.heads,
        n_embd=setting.dim,
        rotary_percentage=1.0,
        parallel_residual=False,
        bias=False,
        norm_class_name="RMSNorm",
        norm_eps=setting.norm_epsilon,
        mlp_class_name="LLaMAMLP",
        intermediate_size=setting.ffn,
        rope_base=int(setting.rope_theta),
    )
    model = GPT(config)
    for weight in model.parameters():
        if weight.ndim == 2:
            torch.nn.init.normal_(weight, std=0.02)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=LEARNING_RATE, betas=BETAS, eps=EPSILON, weight_decay=WEIGHT_DECAY, fused=True
    )
    forward = torch.compile(model) if setting.compile else model

    def step(tokens, targets) -> float:
        with torch.autocast("cpu", torch.bfloat16, enabled=setting.bf16):
            logits = forward(tokens)
            loss = chunked_cross_entropy(logits, targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.item()

    return step, sum(parameter.numel() for parameter in model.parameters())
