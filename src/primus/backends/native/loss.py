"""Cross-entropy of a linear head, without the logits of a whole long sequence in memory.

Shape suffixes: T tokens (batch x sequence), D model width, V vocabulary.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

IGNORED = -100
"""Target of a token that has no loss; the convention of torch's and Hugging Face's cross-entropy."""

CHUNK_BYTES = {"cpu": 128 << 20, "default": 1 << 30}
"""Memory of one chunk of logits without `loss_chunk_size`; an accelerator needs large matrices to be busy."""

SMALLEST = 1e-30
"""Probability below which -log p is taken from the logits, as float32 ends near 1e-38."""

TILE = 256
"""Tokens whose logits a CPU finishes at once, so that they stay in its cache (docs/native-speed.md)."""

MOST_COMPILED_TILES = 8
"""Tiles of one chunk in a compiled graph: each is unrolled in it, and costs time to compile."""


def cross_entropy(
    hidden: Tensor, weight_VD: Tensor, targets: Tensor, scale: Tensor | None = None, chunk: int | None = None
) -> Tensor:
    """`scale` x the sum of -log p(target) over the tokens whose target is not IGNORED, summed in the dtype of `scale`.

    With scale = 1 / (tokens with a target in all micro batches of all processes) the sum over micro batches and
    processes is the mean, and so are the gradients.

    Args:
        hidden: Hidden states [..., D].
        weight_VD: The output head; used in the dtype of `hidden`.
        targets: Token ids, the shape of `hidden` without D.
        scale: A float32 or float64 scalar on the same device; 1 in float32 when None.
        chunk: Tokens whose logits are in memory at once; chosen from the vocabulary when None.
    """
    if scale is None:
        scale = torch.ones((), device=hidden.device)
    if chunk is None:
        chunk = choose_chunk(weight_VD.shape[0], hidden)
    return _LinearCrossEntropy.apply(hidden.flatten(0, -2), weight_VD, targets.flatten(), scale, chunk)


def choose_chunk(vocabulary: int, hidden: Tensor) -> int:
    """Tokens in a chunk: as many as CHUNK_BYTES hold, in whole tiles.

    One tile in float32 on the CPU, where gradients of the head accumulate in place at no loss; bfloat16 gradients
    are summed over as many tokens as possible before they are rounded.
    """
    eager_cpu = hidden.device.type == "cpu" and not torch.compiler.is_compiling()
    if eager_cpu and hidden.dtype == torch.float32:
        return TILE
    memory = CHUNK_BYTES.get(hidden.device.type, CHUNK_BYTES["default"])
    return max(TILE, memory // (vocabulary * hidden.element_size()) // TILE * TILE)


def count_targets(targets: Tensor) -> Tensor:
    """How many targets have a loss; an int64 scalar on their device."""
    return (targets != IGNORED).sum()


class _LinearCrossEntropy(torch.autograd.Function):
    """Computes the gradients in the forward pass, while the logits of a chunk are in memory: nothing is computed twice.

    Idea: Liger Kernel (arXiv 2410.10989), section 3.2, "FusedLinearCrossEntropy".
    """

    @staticmethod
    def forward(ctx, hidden_TD: Tensor, master_VD: Tensor, targets_T: Tensor, scale: Tensor, chunk: int) -> Tensor:
        weight_VD = master_VD.to(hidden_TD.dtype)
        counted_T1 = (targets_T != IGNORED).unsqueeze(1)
        # IGNORED is not a row of the vocabulary; the weight 0 of its row removes what index 0 gives.
        index_T1 = targets_T.clamp_min(0).unsqueeze(1)
        losses, grad_hidden, grad_weight_VD = [], [], None
        for rows in _split_spans(hidden_TD.shape[0], chunk):
            hidden_cD = hidden_TD[rows]
            losses_c1, grad_cV, totals_c1 = _compute_losses_and_gradient(hidden_cD, weight_VD, index_T1[rows])
            weights_c1 = counted_T1[rows] * scale
            losses.append((losses_c1 * weights_c1).sum())
            # An evaluation needs no gradients, and nothing else of the chunk.
            if not any(ctx.needs_input_grad):
                continue
            # Rows are weighted in the narrow matrices [c, D], which is much less work than in [c, V].
            weights_c1 = (weights_c1 / totals_c1).to(hidden_TD.dtype)
            grad_hidden.append((grad_cV @ weight_VD).mul_(weights_c1))
            if ctx.needs_input_grad[1]:
                grad_weight_VD = _add_product(grad_weight_VD, grad_cV.t(), hidden_cD * weights_c1)
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
        return _scale_gradient(grad_hidden_TD, grad), grad_weight_VD, None, None, None


def _compute_losses_and_gradient(
    hidden_cD: Tensor, weight_VD: Tensor, index_c1: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """-log p of each target, float32 [c, 1]; (softmax(logits) - onehot(target)) x totals in the dtype of `hidden_cD`;
    the totals, float32 [c, 1]."""
    num_tokens = hidden_cD.shape[0]
    is_compiling = torch.compiler.is_compiling()
    if hidden_cD.device.type != "cpu" or is_compiling:
        size = max(TILE, math.ceil(num_tokens / MOST_COMPILED_TILES)) if is_compiling else num_tokens
        tiles = _split_spans(num_tokens, size)
        parts = [_compute_by_logsumexp(hidden_cD[rows] @ weight_VD.t(), index_c1[rows]) for rows in tiles]
        losses_c1 = _concatenate_parts([losses for losses, _ in parts])
        return losses_c1, _concatenate_parts([gradient for _, gradient in parts]), torch.ones_like(losses_c1)
    # The product is a tile already; no copy into a larger tensor is needed.
    if num_tokens <= TILE and hidden_cD.dtype == torch.float32:
        return _compute_by_softmax(hidden_cD @ weight_VD.t(), index_c1)
    losses_c1, totals_c1 = hidden_cD.new_empty((2, num_tokens, 1), dtype=torch.float32)
    grad_cV = hidden_cD.new_empty((num_tokens, weight_VD.shape[0]))
    for rows in _split_spans(num_tokens, TILE):
        found = _compute_by_softmax(hidden_cD[rows] @ weight_VD.t(), index_c1[rows])
        losses_c1[rows], grad_cV[rows], totals_c1[rows] = found
    return losses_c1, grad_cV, totals_c1


def _compute_by_softmax(logits_cV: Tensor, index_c1: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Losses and gradient in float32 with torch's softmax, which passes over memory least often, and its totals.

    On a CPU the rows of torch's softmax add up to 1 + 1e-5 for logits of trained models: it adds the exponentials in
    float32, one after the other, while `sum` adds them in pairs. The total corrects the loss, and divides the gradient
    later, in a narrower matrix.
    """
    grad_cV = torch.softmax(logits_cV, 1, dtype=torch.float32)
    totals_c1 = grad_cV.sum(1, keepdim=True)
    target_c1 = grad_cV.gather(1, index_c1)
    losses_c1 = totals_c1.log() - target_c1.log()
    # A tiny probability has lost its digits in softmax; the logits still have them.
    if not target_c1.min() > SMALLEST:  # also where it is NaN
        losses_c1 = logits_cV.float().logsumexp(1, keepdim=True) - logits_cV.gather(1, index_c1)
    return losses_c1, grad_cV.scatter_(1, index_c1, target_c1 - totals_c1), totals_c1


def _compute_by_logsumexp(logits_cV: Tensor, index_c1: Tensor) -> tuple[Tensor, Tensor]:
    """The same without reading values on the host, for GPUs and for the compiler."""
    wide_cV = logits_cV.float()
    logsumexp_c1 = wide_cV.logsumexp(1, keepdim=True)
    # A comparison instead of a scatter: the compiler fuses it into the same pass.
    columns_V = torch.arange(wide_cV.shape[1], device=wide_cV.device)
    grad_cV = (wide_cV - logsumexp_c1).exp() - (columns_V == index_c1).float()
    return logsumexp_c1 - wide_cV.gather(1, index_c1), grad_cV.to(logits_cV.dtype)


def _split_spans(length: int, size: int) -> list[slice]:
    return [slice(start, min(start + size, length)) for start in range(0, length, size)]


def _add_product(total: Tensor | None, left: Tensor, right: Tensor) -> Tensor:
    """total + left @ right, in float32 from the second chunk on."""
    if total is None:
        return left @ right
    if left.dtype == torch.float32:
        return total.addmm_(left, right)
    return total.float().add_(left @ right)


def _concatenate_parts(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _scale_gradient(gradient: Tensor, factor: Tensor) -> Tensor:
    """gradient x factor; the factor is 1 unless the loss was scaled, and reading it on the CPU costs nothing."""
    if factor.device.type == "cpu" and not torch.compiler.is_compiling() and factor.item() == 1.0:
        return gradient
    return gradient * factor
