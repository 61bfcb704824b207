"""Generation of tokens by a trained model."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from primus.checkpoint.weights import WeightReader
from primus.config.schema import ModelSpec
from primus.frameworks.native.engine.collectives import enter_tensor_region, gather_context
from primus.frameworks.native.engine.model import Transformer, load_weights
from primus.frameworks.native.engine.placement import find_begin


@torch.no_grad()
def generate_tokens(
    model: Transformer,
    prompt_tokens: Sequence[int],
    max_new_tokens: int,
    temperature: float,
    seed: int,
    ends: Collection[int] = (),
) -> list[int]:
    """The tokens that follow a prompt, without the prompt, until one of `ends`; the most likely at temperature 0.

    Nothing is cached: each token is a pass over the last `max_position_embeddings` tokens, which a short sample
    after training can afford. If the model is sharded, every process must call this with the same arguments.

    Raises:
        ValueError: The prompt is empty.
    """
    if not prompt_tokens:
        raise ValueError("generate needs at least one token to continue")
    # On the CPU, also for a model on a GPU: the same seed draws the same tokens in every process of a sharded model.
    generator = torch.Generator().manual_seed(seed)
    tokens = list(prompt_tokens)
    for _ in range(max_new_tokens):
        logits_V = _compute_next_logits(model, tokens[-model.spec.max_position_embeddings :])
        tokens.append(_choose_token(logits_V.float().cpu(), temperature, generator))
        if tokens[-1] in ends:
            break
    return tokens[len(prompt_tokens) :]


@torch.no_grad()
def compute_logits(spec: ModelSpec, weights: WeightReader, tokens_BS: Tensor) -> Tensor:
    """Logits [B, S, V] of a model with weights in hub names, float32 on the CPU.

    Raises:
        UsageError: native does not support this model.
    """
    model = build_loaded_model(spec, weights)
    return model(tokens_BS) @ model.output_weight.T


def build_loaded_model(spec: ModelSpec, weights: WeightReader) -> Transformer:
    """A model on the CPU in float32, with weights in hub names.

    Raises:
        UsageError: native does not support this model.
    """
    with torch.device("meta"):
        model = Transformer(spec)
    model.to_empty(device="cpu")
    load_weights(model, weights)
    return model


def _compute_next_logits(model: Transformer, tokens: Sequence[int]) -> Tensor:
    """Logits [V] of the token after `tokens`, from all processes that share the model."""
    layout = model.layout
    # What follows the last token changes nothing before it, and the processes share whole parts.
    parts = (2 * layout.context.size if layout.context.size > 1 else 1) * layout.tensor.size
    padded = [*tokens, *([0] * (-len(tokens) % parts))]
    hidden_BSD = model(torch.tensor([padded], device=model.frequencies.device))
    hidden_BSD = gather_context(enter_tensor_region(hidden_BSD, layout), layout.context, 1)
    hidden_D = hidden_BSD[0, len(tokens) - 1]
    own_V = model.output_weight.to(hidden_D.dtype) @ hidden_D
    if layout.tensor.size == 1:
        return own_V
    logits_V = own_V.new_zeros(model.spec.vocab_size)
    logits_V.narrow(0, find_begin(len(logits_V), layout.tensor), len(own_V)).copy_(own_V)
    dist.all_reduce(logits_V, group=layout.tensor.group)
    return logits_V


def _choose_token(logits_V: Tensor, temperature: float, generator: torch.Generator) -> int:
    if temperature == 0.0:
        return int(logits_V.argmax())
    return int(torch.multinomial(torch.softmax(logits_V / temperature, 0), 1, generator=generator))
