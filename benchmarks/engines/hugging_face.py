"""transformers' LlamaForCausalLM or MixtralForCausalLM in a plain loop: autocast for bf16, as its Trainer does."""

from __future__ import annotations

import torch
from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

from engines.setting import BETAS, CLIP, EPSILON, LEARNING_RATE, SEED, WEIGHT_DECAY, Setting

PACKAGES = ["torch", "transformers"]


def make(setting: Setting):
    torch.manual_seed(SEED)
    kind, model_class, options = LlamaConfig, LlamaForCausalLM, {}
    if setting.experts:
        kind, model_class = MixtralConfig, MixtralForCausalLM
        options = {
            "num_local_experts": setting.experts,
            "num_experts_per_tok": setting.experts_of_token,
            "experts_implementation": setting.expert_kernel,
        }
    config = kind(
        vocab_size=setting.vocab,
        hidden_size=setting.dim,
        intermediate_size=setting.ffn,
        num_hidden_layers=setting.layers,
        num_attention_heads=setting.heads,
        num_key_value_heads=setting.groups or setting.heads,
        max_position_embeddings=setting.sequence,
        rms_norm_eps=setting.norm_epsilon,
        rope_theta=setting.rope_theta,
        tie_word_embeddings=False,
        use_cache=False,
        attn_implementation="sdpa",
        **options,
    )
    model = model_class(config).to(setting.device).train()
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=LEARNING_RATE, betas=BETAS, eps=EPSILON, weight_decay=WEIGHT_DECAY, fused=True
    )
    forward = torch.compile(model) if setting.compile else model

    def step(tokens, targets) -> float:
        with torch.autocast(setting.device, torch.bfloat16, enabled=setting.bf16):
            loss = forward(input_ids=tokens, labels=targets, shift_labels=targets).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.item()

    return step, sum(parameter.numel() for parameter in model.parameters())
