"""Cross-entropy of a linear head, without the logits of a whole long sequence in memory.

Shape suffixes: T tokens (batch x sequence), D model width, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from primus.frameworks.native.engine.ops import choose_wide_dtype, is_on_cpu, is_planned_compiled

IGNORED = -100
"""Target of a token that has no loss; the convention of torch's and Hugging Face's cross-entropy."""

CHUNK_BYTES = {"cpu": 128 << 20, "default": 1 << 30}
"""Memory of one chunk of logits without `loss_chunk_size`; an accelerator needs large matrices to be busy."""

TILE = 256
"""Tokens whose logits a CPU finishes at once, so that they stay in its cache (docs/native-speed.md)."""

SMALLEST = 1e-30
"""Probability below which -log p is taken from the logits, as float32 ends near 1e-38."""

PART = 512
"""Elements of a row that are added up in float32."""

MOST_COMPILED_TILES = 8
"""Tiles of one chunk in a compiled graph: each is unrolled in it, and costs time to compile."""


class HeadPart(NamedTuple):
    """The rows of the output head that a process has."""

    begin: int
    """The first one."""
    group: dist.ProcessGroup | None
    """The processes that have the others."""


class LossSettings(NamedTuple):
    """How the logits are computed."""

    chunk: int | None = None
    """Tokens whose logits are in memory at once; chosen from the vocabulary when None."""
    softcap: float | None = None
    """Soft limit of the logits, softcap x tanh(logit / softcap) (Gemma 2); none when None."""
    is_fused: bool = False
    """Compile what is between the products, where the model around it is not compiled as a whole."""


USUAL = LossSettings()


def cross_entropy(
    hidden: Tensor,
    weight_VD: Tensor,
    targets: Tensor,
    scale: Tensor | None = None,
    settings: LossSettings = USUAL,
    part: HeadPart | None = None,
) -> Tensor:
    """`scale` x the sum of -log p(target) over the tokens whose target is not IGNORED, float64.

    With scale = 1 / (tokens with a target in all micro batches of all processes) the sum over micro batches and
    processes is the mean, and so are the gradients.

    Args:
        hidden: Hidden states [..., D].
        weight_VD: The output head; used in the dtype of `hidden`.
        targets: Token ids, the shape of `hidden` without D.
        scale: A float64 scalar on the same device; 1 when None.
        settings: How they are computed.
        part: Which rows of the head these are; all when None. The gradient of `hidden` is then a part, too.
    """
    if scale is None:
        scale = torch.ones((), dtype=torch.float64, device=hidden.device)
    return _LinearCrossEntropy.apply(hidden.flatten(0, -2), weight_VD, targets.flatten(), scale, settings, part)


def choose_chunk(vocabulary: int, hidden: Tensor) -> int:
    """Tokens in a chunk: as many as CHUNK_BYTES hold, in whole tiles.

    One tile in float32 on the CPU, where gradients of the head accumulate in place at no loss; bfloat16 gradients
    are summed over as many tokens as possible before they are rounded.
    """
    eager_cpu = is_on_cpu(hidden) and not torch.compiler.is_compiling()
    if eager_cpu and hidden.dtype == torch.float32:
        return TILE
    memory = CHUNK_BYTES["cpu" if is_on_cpu(hidden) else "default"]
    return max(TILE, memory // (vocabulary * hidden.element_size()) // TILE * TILE)


def count_targets(targets: Tensor) -> Tensor:
    """How many targets have a loss; an int64 scalar on their device."""
    return (targets != IGNORED).sum()


def add_loss(x: Tensor, loss: Tensor) -> Tensor:
    """`x`, and the gradient of `loss` besides: the loss that is reported stays that of the tokens (as Megatron-LM's
    `MoEAuxLossAutoScaler` and `MTPLossAutoScaler`)."""
    return _AddLoss.apply(x, loss)


class _AddLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, loss: Tensor) -> Tensor:
        ctx.dtype = loss.dtype
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):
        return grad, torch.ones((), dtype=ctx.dtype, device=grad.device)


class _LinearCrossEntropy(torch.autograd.Function):
    """Computes the gradients in the forward pass, while the logits of a chunk are in memory: nothing is computed twice.

    Idea: Liger Kernel (arXiv 2410.10989), section 3.2, "FusedLinearCrossEntropy".
    """

    @staticmethod
    def forward(
        ctx,
        hidden_TD: Tensor,
        master_VD: Tensor,
        targets_T: Tensor,
        scale: Tensor,
        settings: LossSettings,
        part: HeadPart | None,
    ) -> Tensor:
        weight_VD = master_VD.to(hidden_TD.dtype)
        counted_T1 = (targets_T != IGNORED).unsqueeze(1)
        # IGNORED is not a row of the vocabulary; the weight 0 of its row removes what index 0 gives.
        index_T1 = targets_T.clamp_min(0).unsqueeze(1)
        if part is not None:
            index_T1 = index_T1 - part.begin
        chunk = settings.chunk or choose_chunk(weight_VD.shape[0], hidden_TD)
        losses, grad_hidden, grad_weight_VD = [], [], None
        for rows in _split_spans(hidden_TD.shape[0], chunk):
            hidden_cD = hidden_TD[rows]
            losses_c1, grad_cV, totals_c1 = _compute_losses_and_gradient(
                hidden_cD, weight_VD, index_T1[rows], settings, part
            )
            weights_c1 = counted_T1[rows] * scale
            losses.append((losses_c1 * weights_c1).sum())
            # An evaluation needs no gradients, and nothing else of the chunk.
            if not any(ctx.needs_input_grad):
                continue
            # Rows are weighted in the narrow matrices [c, D], which is much less work than in [c, V].
            weights_c1 = (weights_c1 / totals_c1).to(choose_wide_dtype(hidden_TD.dtype))
            grad_hidden.append((grad_cV @ weight_VD).mul_(weights_c1))
            if ctx.needs_input_grad[1]:
                weighted_cD = (hidden_cD * weights_c1).to(hidden_cD.dtype)
                grad_weight_VD = _add_product(grad_weight_VD, grad_cV.t(), weighted_cD)
        if grad_hidden:
            ctx.save_for_backward(_concatenate_parts(grad_hidden), grad_weight_VD)
            ctx.weight_dtype = master_VD.dtype
        return torch.stack(losses).sum()

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):
        grad_hidden_TD, grad_weight_VD = ctx.saved_tensors
        if grad_weight_VD is not None:
            # The masters are float32, whatever the dtype of the products.
            grad_weight_VD = _scale_gradient(grad_weight_VD.to(ctx.weight_dtype), grad)
        return _scale_gradient(grad_hidden_TD, grad), grad_weight_VD, None, None, None, None


def _compute_losses_and_gradient(
    hidden_cD: Tensor, weight_VD: Tensor, index_c1: Tensor, settings: LossSettings, part: HeadPart | None
) -> tuple[Tensor, ...]:
    """Of each row of logits: -log p of its target; its exponentials - onehot(target) x their total; and their total.

    The second divided by the third is the gradient, softmax(logits) - onehot(target). It is [c, V] in the dtype of
    `hidden_cD`; the others are float64 [c, 1].
    """
    num_tokens, is_compiling = hidden_cD.shape[0], torch.compiler.is_compiling()
    if part is not None or settings.softcap is not None or not is_on_cpu(hidden_cD):
        is_fused = (settings.is_fused or is_planned_compiled()) and not is_compiling
        passes = FUSED if is_fused else PLAIN
        return _exponentiate(hidden_cD @ weight_VD.t(), index_c1, settings.softcap, part and part.group, passes)
    if not is_compiling:
        return _compute_in_tiles(hidden_cD, weight_VD, index_c1)
    tile = max(TILE, math.ceil(num_tokens / MOST_COMPILED_TILES))
    parts = [_exponentiate(hidden_cD[rows] @ weight_VD.t(), index_c1[rows]) for rows in _split_spans(num_tokens, tile)]
    return tuple(_concatenate_parts(list(each)) for each in zip(*parts, strict=True))


def _compute_in_tiles(hidden_cD: Tensor, weight_VD: Tensor, index_c1: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    num_tokens = hidden_cD.shape[0]
    # The product is a tile already; no copy into a larger tensor is needed.
    if num_tokens <= TILE and hidden_cD.dtype == choose_wide_dtype(hidden_cD.dtype):
        return _exponentiate_by_softmax(hidden_cD @ weight_VD.t(), index_c1)
    losses_c1, totals_c1 = hidden_cD.new_empty((2, num_tokens, 1), dtype=torch.float64)
    grad_cV = hidden_cD.new_empty((num_tokens, weight_VD.shape[0]))
    for rows in _split_spans(num_tokens, TILE):
        found = _exponentiate_by_softmax(hidden_cD[rows] @ weight_VD.t(), index_c1[rows])
        losses_c1[rows], grad_cV[rows], totals_c1[rows] = found
    return losses_c1, grad_cV, totals_c1


def _find_largest(logits_cV: Tensor, softcap: float | None) -> Tensor:
    """The largest logit of each row, [c, 1]."""
    return _bend(logits_cV.amax(1, keepdim=True), softcap)


def _sum_exponentials(logits_cV: Tensor, largest_c1: Tensor, index_c1: Tensor, softcap: float | None) -> Tensor:
    """Of each row, the total of its exponentials, and the logit of its target if it is among these: float64 [2, c, 1].

    float64 costs nothing for one number a token; float32 rounds logits of 20 to 1e-6.
    """
    wide_cV, columns = _bend(logits_cV, softcap), logits_cV.shape[1]
    targets_c1 = wide_cV.gather(1, index_c1.clamp(0, columns - 1)).double()
    is_here_c1 = (index_c1 >= 0) & (index_c1 < columns)
    return torch.stack((_sum_rows((wide_cV - largest_c1).exp()), torch.where(is_here_c1, targets_c1, 0.0)))


def _derive_logits(
    logits_cV: Tensor, largest_c1: Tensor, index_c1: Tensor, totals_c1: Tensor, softcap: float | None
) -> Tensor:
    """Exponentials - onehot(target) x their total, [c, V], in the dtype of the logits."""
    wide_cV = _bend(logits_cV, softcap)
    # A comparison instead of a scatter: the compiler fuses it into the same pass.
    columns_V = torch.arange(wide_cV.shape[1], device=wide_cV.device)
    targets_cV = torch.where(columns_V == index_c1, totals_c1.to(wide_cV.dtype), 0.0)
    grad_cV = (wide_cV - largest_c1).exp() - targets_cV
    if softcap is not None:
        grad_cV = grad_cV * (1.0 - (wide_cV / softcap).square())
    return grad_cV.to(logits_cV.dtype)


def _bend(logits: Tensor, softcap: float | None) -> Tensor:
    wide = logits.to(choose_wide_dtype(logits.dtype))
    return wide if softcap is None else softcap * torch.tanh(wide / softcap)


_compile = cache(lambda function: torch.compile(function, dynamic=False))


@torch.library.custom_op("primus::find_largest_logit", mutates_args=())
def _find_largest_fused(logits_cV: Tensor, softcap: float | None) -> Tensor:
    return _compile(_find_largest)(logits_cV, softcap)


@_find_largest_fused.register_fake
def _(logits_cV: Tensor, softcap: float | None) -> Tensor:
    return logits_cV.new_empty((logits_cV.shape[0], 1), dtype=choose_wide_dtype(logits_cV.dtype))


@torch.library.custom_op("primus::sum_exponentials", mutates_args=())
def _sum_exponentials_fused(logits_cV: Tensor, largest_c1: Tensor, index_c1: Tensor, softcap: float | None) -> Tensor:
    return _compile(_sum_exponentials)(logits_cV, largest_c1, index_c1, softcap)


@_sum_exponentials_fused.register_fake
def _(logits_cV: Tensor, largest_c1: Tensor, index_c1: Tensor, softcap: float | None) -> Tensor:
    return logits_cV.new_empty((2, logits_cV.shape[0], 1), dtype=torch.float64)


@torch.library.custom_op("primus::derive_logits", mutates_args=())
def _derive_logits_fused(
    logits_cV: Tensor, largest_c1: Tensor, index_c1: Tensor, totals_c1: Tensor, softcap: float | None
) -> Tensor:
    return _compile(_derive_logits)(logits_cV, largest_c1, index_c1, totals_c1, softcap)


@_derive_logits_fused.register_fake
def _(logits_cV: Tensor, largest_c1: Tensor, index_c1: Tensor, totals_c1: Tensor, softcap: float | None) -> Tensor:
    return torch.empty_like(logits_cV)


class Passes(NamedTuple):
    """The passes over the logits between the products."""

    find_largest: Callable[..., Tensor]
    sum_exponentials: Callable[..., Tensor]
    derive: Callable[..., Tensor]


PLAIN = Passes(_find_largest, _sum_exponentials, _derive_logits)
FUSED = Passes(_find_largest_fused, _sum_exponentials_fused, _derive_logits_fused)
"""Each is one operator, compiled for itself, so that its wide temporaries are never in memory."""


def _exponentiate(
    logits_cV: Tensor,
    index_c1: Tensor,
    softcap: float | None = None,
    group: dist.ProcessGroup | None = None,
    passes: Passes = PLAIN,
) -> tuple[Tensor, Tensor, Tensor]:
    """See `_compute_losses_and_gradient`; for GPUs and for the compiler, without reading values on the host.

    With a group of the columns of this process, where an index of another one is out of range.
    """
    largest_c1 = passes.find_largest(logits_cV, softcap)
    if group is not None:
        dist.all_reduce(largest_c1, dist.ReduceOp.MAX, group)
    sums_2c1 = passes.sum_exponentials(logits_cV, largest_c1, index_c1, softcap)
    if group is not None:
        dist.all_reduce(sums_2c1, group=group)
    totals_c1, targets_c1 = sums_2c1
    grad_cV = passes.derive(logits_cV, largest_c1, index_c1, totals_c1, softcap)
    return totals_c1.log() + (largest_c1.double() - targets_c1), grad_cV, totals_c1


def _exponentiate_by_softmax(logits_cV: Tensor, index_c1: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """See `_compute_losses_and_gradient`; by torch's softmax, whose exponentials take half the time of `exp` on a CPU.

    Each is within 1e-6, but torch adds them up in as many partial sums as a vector register has elements: the rows of
    trained models, which differ more than random ones, then add up to 1 + 7e-6. Hence the sum of its results counts.
    """
    exponentials_cV = torch.softmax(logits_cV, 1, dtype=choose_wide_dtype(logits_cV.dtype))
    totals_c1 = _sum_rows(exponentials_cV)
    targets_c1 = exponentials_cV.gather(1, index_c1)
    losses_c1 = (totals_c1 / targets_c1).log()
    # A tiny probability has lost its digits in softmax; the logits still have them.
    if not targets_c1.min() > SMALLEST:  # also where it is NaN
        losses_c1, _, _ = _exponentiate(logits_cV, index_c1)
    grad_cV = exponentials_cV.scatter_(1, index_c1, targets_c1 - totals_c1.to(targets_c1.dtype))
    return losses_c1, grad_cV, totals_c1


def _sum_rows(values_cV: Tensor) -> Tensor:
    """The sum of each row, float64 [c, 1]: of parts, because one float32 sum loses what is small beside its total."""
    rest = values_cV.shape[1] % PART
    parts = values_cV[:, rest:].unflatten(1, (values_cV.shape[1] // PART, PART)).sum(2)
    return parts.double().sum(1, keepdim=True) + values_cV[:, :rest].sum(1, keepdim=True).double()


def _split_spans(length: int, size: int) -> list[slice]:
    return [slice(start, min(start + size, length)) for start in range(0, length, size)]


def _add_product(total: Tensor | None, left: Tensor, right: Tensor) -> Tensor:
    """total + left @ right, in float32 or wider from the second chunk on."""
    if total is None:
        return left @ right
    wide_dtype = choose_wide_dtype(left.dtype)
    if left.dtype == wide_dtype:
        return total.addmm_(left, right)
    return total.to(wide_dtype).add_(left @ right)


def _concatenate_parts(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _scale_gradient(gradient: Tensor, factor: Tensor) -> Tensor:
    """gradient x factor; the factor is 1 unless the loss was scaled, and reading it on the CPU costs nothing."""
    if is_on_cpu(factor) and not torch.compiler.is_compiling() and factor.item() == 1.0:
        return gradient
    return gradient * factor
