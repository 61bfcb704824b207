"""torchtitan's Llama 3 model, or its Qwen 3 MoE as primus builds it; its chunked loss, and its compilation.

bf16 is its mixed precision policy on one FSDP process (gloo), as its trainer always wraps the model.
"""

from __future__ import annotations

import os
from types import SimpleNamespace

import torch
import torch.distributed as dist

from engines.setting import BETAS, CLIP, EPSILON, LEARNING_RATE, SEED, WEIGHT_DECAY, Setting

if not torch.cuda.is_available():
    torch._utils._get_available_device_type = lambda: "cpu"

from torchtitan.components.loss import ChunkedLossWrapper, CrossEntropyLoss
from torchtitan.config import CompileConfig
from torchtitan.distributed.compile import apply_compile
from torchtitan.models import llama3
from torchtitan.models.common import ComplexRoPE, Embedding, Linear, RMSNorm
from torchtitan.models.common.attention import ScaledDotProductAttention
from torchtitan.models.llama3 import model as llama

PACKAGES = ["torch", "torchtitan"]


def make(setting: Setting):
    torch.manual_seed(SEED)
    llama3.get_attention_config = lambda backend: (
        ScaledDotProductAttention.Config()
    )  # FlexAttention has no CPU backward
    with torch.device(setting.device):
        model = (make_expert_config(setting) if setting.experts else make_config(setting)).build()
        model.init_states(buffer_device=torch.device(setting.device))
    compile_config = CompileConfig(enable=setting.compile, components=["model", "loss"])
    if setting.compile:
        apply_compile(model, compile_config=compile_config, parallel_dims=SimpleNamespace(tp_enabled=False))
    if setting.bf16:
        _mixed_precision(model, setting.device)
    loss_of = ChunkedLossWrapper.Config(loss_fn=CrossEntropyLoss.Config()).build(compile_config=compile_config)
    loss_of.set_lm_head(model.lm_head)
    model._skip_lm_head = True
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=LEARNING_RATE, betas=BETAS, eps=EPSILON, weight_decay=WEIGHT_DECAY, fused=True
    )

    def step(tokens, targets) -> float:
        count = (targets != -100).sum()
        loss, _ = loss_of(model(tokens), targets, count)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP, foreach=True)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.item()

    return step, sum(parameter.numel() for parameter in model.parameters())


def make_config(setting: Setting):
    rope = ComplexRoPE.Config(dim=setting.dim // setting.heads, max_seq_len=setting.sequence, theta=setting.rope_theta)
    return llama.Llama3Model.Config(
        dim=setting.dim,
        vocab_size=setting.vocab,
        tok_embeddings=Embedding.Config(
            num_embeddings=setting.vocab, embedding_dim=setting.dim, param_init=llama3._EMBEDDING_INIT
        ),
        norm=RMSNorm.Config(normalized_shape=setting.dim, eps=setting.norm_epsilon, param_init=llama3._NORM_INIT),
        lm_head=Linear.Config(
            in_features=setting.dim, out_features=setting.vocab, param_init=llama3._output_linear_init(setting.dim)
        ),
        layers=llama3._build_llama3_layers(
            n_layers=setting.layers,
            dim=setting.dim,
            n_heads=setting.heads,
            n_kv_heads=setting.groups or setting.heads,
            hidden_dim=setting.ffn,
            rope=rope,
            attn_backend="sdpa",
        ),
    )


def make_expert_config(setting: Setting):
    from engines.native import build_spec
    from primus.frameworks.torchtitan.engine.float32_experts import use_float32_experts
    from primus.frameworks.torchtitan.engine.model_config import build_model_spec

    config = build_model_spec(build_spec(setting), on_cpu=True, masks_documents=False).model
    if not setting.bf16:
        use_float32_experts(config.layers)
    return config


def _mixed_precision(model, device: str) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torchtitan.distributed.fsdp import apply_fsdp_to_decoder

    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    dist.init_process_group("nccl" if device == "cuda" else "gloo", store=dist.HashStore(), rank=0, world_size=1)
    mesh = init_device_mesh(device, (1,), mesh_dim_names=("fsdp",))
    apply_fsdp_to_decoder(model, mesh, param_dtype=torch.bfloat16, reduce_dtype=torch.float32, pp_enabled=False)
    for module in model.modules():
        if hasattr(module, "set_force_sum_reduction_for_comms"):
            module.set_force_sum_reduction_for_comms(True)  # gloo has no PREMUL_SUM
