"""megatron-core's GPTModel with its own optimizer; bf16 is its Float16Module with fp32 master weights.

megatron-core means CUDA: the calls that name it are answered for the CPU, the arithmetic is untouched.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.tensor_parallel import random as megatron_random
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.moe import moe_utils

from engines.setting import BETAS, CLIP, EPSILON, LEARNING_RATE, SEED, WEIGHT_DECAY, Setting

PACKAGES = ["torch", "megatron-core"]


def make(setting: Setting):
    if setting.compile:
        raise SystemExit("megatron-core compiles nothing by itself")
    _answer_for_cuda()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    tensor_parallel.model_parallel_cuda_manual_seed(SEED)
    config = TransformerConfig(
        num_layers=setting.layers,
        hidden_size=setting.dim,
        ffn_hidden_size=setting.ffn,
        num_attention_heads=setting.heads,
        normalization="RMSNorm",
        layernorm_epsilon=setting.norm_epsilon,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        use_cpu_initialization=True,
        bf16=setting.bf16,
        params_dtype=torch.bfloat16 if setting.bf16 else torch.float32,
        pipeline_dtype=torch.bfloat16 if setting.bf16 else torch.float32,
        gradient_accumulation_fusion=False,
        bias_activation_fusion=False,
        masked_softmax_fusion=False,
        apply_rope_fusion=False,
        attention_softmax_in_fp32=not setting.bf16,
        num_moe_experts=setting.experts,
        moe_router_topk=setting.experts_of_token,
        moe_router_load_balancing_type="none",
        moe_token_dispatcher_type="allgather",
    )
    model = GPTModel(
        config,
        get_gpt_layer_local_spec(num_experts=setting.experts, normalization="RMSNorm"),
        vocab_size=setting.vocab,
        max_sequence_length=setting.sequence,
        position_embedding_type="rope",
        rotary_base=int(setting.rope_theta),
        share_embeddings_and_output_weights=False,
    )
    parameters = sum(parameter.numel() for parameter in model.parameters())
    wrapped = Float16Module(config, model) if setting.bf16 else model
    parallel = DistributedDataParallel(config, DistributedDataParallelConfig(), wrapped)
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            lr=LEARNING_RATE,
            weight_decay=WEIGHT_DECAY,
            adam_beta1=BETAS[0],
            adam_beta2=BETAS[1],
            adam_eps=EPSILON,
            clip_grad=CLIP,
            bf16=setting.bf16,
            params_dtype=config.params_dtype,
        ),
        [parallel],
    )
    positions = torch.arange(setting.sequence).unsqueeze(0)
    future = torch.ones(1, 1, setting.sequence, setting.sequence, dtype=torch.bool).triu(1)

    def step(tokens, targets) -> float:
        parallel.zero_grad_buffer()
        optimizer.zero_grad()
        loss = parallel(tokens, positions.expand_as(tokens), future, labels=targets).float().mean()
        loss.backward()
        finalize_model_grads([parallel])
        optimizer.step()
        return loss.item()

    return step, parameters


def _answer_for_cuda() -> None:
    moe_utils.te_general_gemm = None  # it is named even where Transformer Engine is missing
    torch.cuda.current_device = lambda: torch.device("cpu")
    # One function each: the compiler refuses one under several names.
    for name in ("synchronize", "empty_cache", "manual_seed"):
        setattr(torch.cuda, name, lambda *_: None)
    torch.cuda.get_rng_state = lambda *_: torch.get_rng_state()
    torch.Tensor.cuda = lambda tensor, *_, **__: tensor
    megatron_random._get_cuda_rng_state = lambda *_, **__: torch.get_rng_state()
    megatron_random._set_cuda_rng_state = lambda state, *_, **__: torch.set_rng_state(state)
    for name in ("tensor", "zeros", "ones", "empty", "full", "arange"):
        setattr(torch, name, _on_cpu(getattr(torch, name)))
    type_name = torch.Tensor.type
    torch.Tensor.type = lambda tensor, *arguments, **options: (
        type_name(tensor, *arguments, **options)
        if arguments or options
        else type_name(tensor).replace("torch.", "torch.cuda.")
    )


def _on_cpu(constructor):
    def construct(*arguments, **options):
        if options.get("device") == "cuda":
            options["device"] = "cpu"
        return constructor(*arguments, **options)

    return construct
