"""The part of a GPT model of megatron-core that this process holds."""

from __future__ import annotations

import math
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from primus.config.schema import ModelSpec, Trainer
from primus.frameworks.megatron.engine.config import collect_values
from primus.models.counts import head_dim

VOCABULARY_WEIGHTS = ("embedding.word_embeddings.weight", "output_layer.weight")
"""Ends of the names of the weights with a row for each token."""


class SequenceParallelNorm(nn.RMSNorm):
    """RMSNorm of the local layers; that of megatron-core refuses sequence parallelism.

    With it each rank sees a part of the sequence, and `finalize_model_grads` adds up the gradients of the weights that
    are marked (megatron/core/distributed/finalize_model_grads.py).
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **unused: Any) -> None:
        super().__init__(hidden_size, eps=eps)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]


def build_gpt_model(trainer: Trainer, config: TransformerConfig, use_transformer_engine: bool) -> GPTModel:
    """The layers of this process's pipeline stage, and its part of their matrices; its weights are not ours yet."""
    model = GPTModel(
        config=config,
        transformer_layer_spec=build_layers(config, use_transformer_engine),
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        parallel_output=True,
        position_embedding_type="rope",
        rotary_base=int(trainer.model.rotary_base),
        **collect_values(trainer, "model"),
    )
    if not trainer.model.multi_latent_attention:
        # GPTModel knows one original length and one pair of frequency factors of llama3 rope, and an integer base.
        model.rotary_pos_emb.inv_freq = compute_frequencies(trainer.model)
    exclude_padding(model, trainer.model.vocab_size)
    return model


def build_layers(config: TransformerConfig, use_transformer_engine: bool) -> Any:
    """The layers of a model with RMSNorm, by Transformer Engine or by megatron-core alone."""
    block = get_gpt_decoder_block_spec(config, use_transformer_engine, normalization="RMSNorm")
    if not use_transformer_engine:
        _replace_norms(block)
    return block


def exclude_padding(model: nn.Module, vocab_size: int) -> None:
    """Keep the rows that pad the vocabulary out of the softmax, the gradients and the optimizer: they stay zero.

    Megatron-LM leaves them in the softmax, so that its loss depends on the layout. No token has their id, so the
    embedding gives them no gradient; neither do their logits, which are the smallest number of their type here. It is
    finite, because fused softmaxes subtract the largest logit of a rank, whose rows may all be padding.
    """
    rank = parallel_state.get_tensor_model_parallel_rank()

    def find_padding(num_rows: int) -> slice:
        return slice(min(max(vocab_size - rank * num_rows, 0), num_rows), num_rows)

    def mask(layer: nn.Module, inputs: Any, outputs: tuple[Tensor, Tensor | None]) -> None:
        logits = outputs[0]
        padding = find_padding(logits.shape[-1])
        if padding.start < padding.stop:
            logits[..., padding] = torch.finfo(logits.dtype).min

    for name, parameter in model.named_parameters():
        if name.endswith(VOCABULARY_WEIGHTS):
            parameter.data[find_padding(len(parameter))] = 0
    for name, module in model.named_modules():
        if name.endswith("output_layer"):
            module.register_forward_hook(mask)


def compute_frequencies(spec: ModelSpec) -> Tensor:
    """Radians per position of each rotated pair, float32 on the CPU; the formula of native.

    Sources: RoFormer (arXiv 2104.09864), section 3.2.2; `apply_scaling` of meta-llama/llama-models.
    """
    width = head_dim(spec)
    frequencies = 1.0 / spec.rotary_base ** (torch.arange(0, width, 2, dtype=torch.float32) / width)
    if spec.rope_type != "llama3":
        return frequencies
    low, high = spec.rope_low_freq_factor, spec.rope_high_freq_factor
    rotations = spec.original_max_position_embeddings * frequencies / (2 * math.pi)
    kept = ((rotations - low) / (high - low)).clamp(0.0, 1.0)
    return frequencies * (kept + (1.0 - kept) / spec.rotary_scaling_factor)


def _replace_norms(block: Any) -> None:
    """Use `SequenceParallelNorm` for every norm of a block of local layers."""
    block.layer_norm = SequenceParallelNorm
    for layer in block.layer_specs:
        parts = layer.submodules
        parts.input_layernorm = parts.pre_mlp_layernorm = SequenceParallelNorm
        attention = parts.self_attention.submodules
        for name in ("q_layernorm", "k_layernorm"):
            if getattr(attention, name, IdentityOp) is not IdentityOp:
                setattr(attention, name, SequenceParallelNorm)
