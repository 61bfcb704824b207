"""Generation of tokens by a model: a batch of prompts at a time, with a cache of keys and values.

Shape suffixes: B batch, S tokens of a pass, D model width, V vocabulary.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from primus.errors import UsageError
from primus.frameworks.native.engine.cache import KeyValueCache
from primus.frameworks.native.engine.collectives import enter_tensor_region, gather_context
from primus.frameworks.native.engine.model import Transformer, TransformerLayer
from primus.frameworks.native.engine.ops import choose_wide_dtype
from primus.frameworks.native.engine.placement import find_begin


class Sampling(NamedTuple):
    """How tokens are drawn."""

    temperature: float = 0.0
    """Divisor of the logits; at 0 the most likely token is taken."""
    top_k: int = 0
    """Only so many of the most likely tokens are drawn from; 0 for all."""
    top_p: float = 1.0
    """Only the most likely tokens are drawn from, as few as have this probability together (arXiv 1904.09751)."""
    seed: int = 0
    """Of the draws. Each prompt has its own numbers: the other prompts of a batch do not change what it gets."""


GREEDY = Sampling()
MOST_KEPT = 0.75
"""Share of the rows of a batch that are not over, from which on the others are dropped."""


class Completion(NamedTuple):
    """What follows a prompt."""

    tokens: list[int]
    log_probabilities: list[float]
    """Of each token under the model, before temperature, top-k and top-p."""
    stop_reason: str
    """``stop``: a token or text that ends it; ``length``: as long as asked for; ``context``: as long as the model's
    context."""


class Generation(NamedTuple):
    """The completions of a batch."""

    completions: list[Completion]
    """In the order of the prompts."""
    cache_bytes: int
    """Memory of the cache."""


@torch.no_grad()
def generate(
    model: Transformer,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    sampling: Sampling = GREEDY,
    ends: Collection[int] = (),
    is_end: Callable[[Sequence[int]], bool] = lambda _: False,
    numbers: Sequence[int] | None = None,
) -> Generation:
    """Continue prompts of any lengths. If the model is sharded, every process must call this with the same arguments.

    Args:
        model: Whose layers are not divided into pipeline stages.
        prompts: Token ids.
        max_new_tokens: Most tokens of a completion; it is also over where the context of the model is full.
        sampling: How tokens are drawn.
        ends: Tokens that end a completion, and belong to it.
        is_end: Whether the tokens of a completion end it.
        numbers: Of each prompt, by which its draws differ from those of others; its place when None.

    Raises:
        UsageError: A prompt is empty, or fills the context of the model.
    """
    layout, context = model.layout, model.spec.max_position_embeddings
    _check_prompts(prompts, context)
    # What follows the last token changes nothing before it, and the processes that share a sequence have whole parts.
    parts = (2 * layout.context.size if layout.context.size > 1 else 1) * layout.tensor.size
    rows = [
        _Row(prompt, min(max_new_tokens, context - len(prompt)), _draw_noise(sampling.seed, number, max_new_tokens))
        for number, prompt in zip(range(len(prompts)) if numbers is None else numbers, prompts, strict=True)
    ]
    lengths, num_further = [len(row.prompt) for row in rows], max(row.limit for row in rows) + 2 * parts
    documents = model.documents
    tables = model.compute_rotary_tables(max(lengths) + num_further, model.frequencies.dtype)
    cache = KeyValueCache(len(model.layers), lengths, num_further, tables)
    _attach_cache(model, cache)
    model.documents = None  # one text, whatever tokens it has
    try:
        _continue_rows(model, cache, rows, parts, sampling, lambda row: row.tokens[-1] in ends or is_end(row.tokens))
    finally:
        _attach_cache(model, None)
        model.documents = documents
    completions = [Completion(row.tokens, row.log_probabilities, row.name_stop_reason(max_new_tokens)) for row in rows]
    return Generation(completions, cache.num_bytes)


def choose_tokens(logits_BV: Tensor, sampling: Sampling, noise_B: Tensor) -> Tensor:
    """A token of each row: the first whose cumulative probability exceeds the row's number in [0, 1)."""
    if sampling.temperature == 0.0:
        return logits_BV.argmax(1)
    scaled_BV = logits_BV / sampling.temperature
    if 0 < sampling.top_k < scaled_BV.shape[1]:
        smallest_B1 = scaled_BV.topk(sampling.top_k, 1).values[:, -1:]
        scaled_BV = scaled_BV.masked_fill(scaled_BV < smallest_B1, -torch.inf)
    probabilities_BV = torch.softmax(scaled_BV.double(), 1)
    if sampling.top_p < 1.0:
        sorted_BV, order_BV = probabilities_BV.sort(dim=1, descending=True, stable=True)
        is_beyond_BV = sorted_BV.cumsum(1) - sorted_BV >= sampling.top_p
        probabilities_BV = torch.zeros_like(sorted_BV).scatter(1, order_BV, sorted_BV.masked_fill(is_beyond_BV, 0.0))
    cumulative_BV = probabilities_BV.cumsum(1)
    return torch.searchsorted(cumulative_BV, noise_B.unsqueeze(1) * cumulative_BV[:, -1:], right=True).squeeze(1)


class _Row:
    """A prompt and what follows it."""

    def __init__(self, prompt: Sequence[int], limit: int, noise: Tensor) -> None:
        self.prompt, self.limit, self.noise = prompt, limit, noise
        self.tokens: list[int] = []
        self.log_probabilities: list[float] = []
        self.is_ended = False

    @property
    def is_over(self) -> bool:
        return self.is_ended or len(self.tokens) == self.limit

    def name_stop_reason(self, max_new_tokens: int) -> str:
        return "stop" if self.is_ended else "length" if self.limit == max_new_tokens else "context"


def _continue_rows(
    model: Transformer,
    cache: KeyValueCache,
    rows: list[_Row],
    parts: int,
    sampling: Sampling,
    is_end: Callable[[_Row], bool],
) -> None:
    """Add tokens to all rows until they are over: one pass over the prompts, then one for each token."""
    device = model.frequencies.device
    width = max(len(row.prompt) for row in rows)
    width += -width % parts
    tokens_BS = torch.tensor([[*row.prompt, *([0] * (width - len(row.prompt)))] for row in rows], device=device)
    last_B = torch.tensor([len(row.prompt) - 1 for row in rows], device=device)
    noise_BN = torch.stack([row.noise for row in rows]).to(device)
    for number in range(noise_BN.shape[1]):
        logits_BV = _compute_logits(model, tokens_BS, last_B)
        chosen_B1 = choose_tokens(logits_BV, sampling, noise_BN[:, number]).unsqueeze(1)
        scores_B1 = logits_BV.gather(1, chosen_B1) - logits_BV.logsumexp(1, keepdim=True)
        for row, token, score in zip(rows, chosen_B1[:, 0].tolist(), scores_B1[:, 0].tolist(), strict=True):
            if not row.is_over:
                row.tokens.append(token)
                row.log_probabilities.append(score)
                row.is_ended = is_end(row)
        kept = [place for place, row in enumerate(rows) if not row.is_over]
        if not kept:
            return
        # Dropping a row copies the cache of all others, and a row that is over costs a part of a pass.
        if len(kept) <= len(rows) * MOST_KEPT:
            rows = [rows[place] for place in kept]
            places = torch.tensor(kept, device=device)
            chosen_B1, noise_BN = chosen_B1[places], noise_BN[places]
            cache.keep(places)
        tokens_BS, last_B = F.pad(chosen_B1, (0, parts - 1)), torch.zeros(len(rows), dtype=torch.int64, device=device)
        cache.advance(number, parts)


def _attach_cache(model: Transformer, cache: KeyValueCache | None) -> None:
    model.cache = cache
    for number, layer in enumerate(model.layers.values()):
        attention = cast(TransformerLayer, layer).attention
        attention.cache = None if cache is None else cache.layers[number]


def _compute_logits(model: Transformer, tokens_BS: Tensor, last_B: Tensor) -> Tensor:
    """Logits [B, V] in float32 or wider after one token of each sequence, from all processes that share the model."""
    layout = model.layout
    hidden_BSD = model(tokens_BS)
    hidden_BSD = gather_context(enter_tensor_region(hidden_BSD, layout), layout.context, 1)
    hidden_BD = hidden_BSD[torch.arange(len(last_B), device=last_B.device), last_B]
    own_BV = model.compute_logits(hidden_BD)
    if layout.tensor.size == 1:
        return own_BV.to(choose_wide_dtype(own_BV.dtype))
    logits_BV = own_BV.new_zeros((len(own_BV), model.spec.vocab_size))
    logits_BV.narrow(1, find_begin(model.spec.vocab_size, layout.tensor), own_BV.shape[1]).copy_(own_BV)
    dist.all_reduce(logits_BV, group=layout.tensor.group)
    return logits_BV.to(choose_wide_dtype(logits_BV.dtype))


def _draw_noise(seed: int, number: int, length: int) -> Tensor:
    # On the CPU, also for a model on a GPU: the same seed draws the same numbers everywhere.
    generator = torch.Generator().manual_seed(zlib.crc32(f"{seed} {number}".encode()))
    return torch.rand(length, generator=generator, dtype=torch.float64)


def _check_prompts(prompts: Sequence[Sequence[int]], context: int) -> None:
    for number, prompt in enumerate(prompts, 1):
        if not prompt:
            raise UsageError(f"prompt {number} is empty", "give at least one token to continue")
        if len(prompt) >= context:
            raise UsageError(
                f"prompt {number} has {len(prompt)} tokens, which leave no room in a context of {context}",
                "shorten it; the model was trained with no longer texts (max_position_embeddings)",
            )
