"""Cross-entropy of a linear head, without the logits of a whole long sequence in memory.

Shape suffixes: T tokens (batch x sequence), D model width, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

IGNORED = -100
"""Target of a token that has no loss; the convention of torch's and Hugging Face's cross-entropy."""

CHUNK_BYTES = 256 << 20
"""Memory that the logits' gradient may take when no chunk size is asked for."""


def cross_entropy(
    hidden: Tensor, weight_VD: Tensor, targets: Tensor, scale: Tensor | None = None, chunk: int | None = None
) -> Tensor:
    """`scale` x the sum of -log p(target) over the tokens whose target is not IGNORED; a float32 scalar.

    With scale = 1 / (tokens with a target in all micro batches of all processes) the sum over micro batches and
    processes is the mean, and so are the gradients.

    Args:
        hidden: Hidden states [..., D].
        weight_VD: The output head; used in the dtype of `hidden`.
        targets: Token ids, the shape of `hidden` without D.
        scale: A scalar on the same device; 1 when None.
        chunk: Tokens whose logits are in memory at once; chosen from the vocabulary when None.
    """
    hidden_TD = hidden.flatten(0, -2)
    if scale is None:
        scale = torch.ones((), device=hidden.device)
    if chunk is None:
        chunk = default_chunk(weight_VD.shape[0], hidden.element_size())
    return _LinearCrossEntropy.apply(hidden_TD, weight_VD.to(hidden.dtype), targets.flatten(), scale, chunk)


def default_chunk(vocabulary: int, element_bytes: int) -> int:
    """Tokens in a chunk: as many as CHUNK_BYTES hold, in multiples of 128 and at least 128."""
    return max(128, CHUNK_BYTES // (vocabulary * element_bytes) // 128 * 128)


def count_targets(targets: Tensor) -> Tensor:
    """How many targets have a loss; an int64 scalar on their device."""
    return (targets != IGNORED).sum()


class _LinearCrossEntropy(torch.autograd.Function):
    """Takes the gradients in the forward pass, while the logits of a chunk are there: nothing is computed twice.

    Idea: Liger Kernel (arXiv 2410.10989), section 3.2, "FusedLinearCrossEntropy".
    """

    @staticmethod
    def forward(ctx, hidden_TD: Tensor, weight_VD: Tensor, targets_T: Tensor, scale: Tensor, chunk: int) -> Tensor:
        ctx.needed = ctx.needs_input_grad[:2]
        if not any(ctx.needed):
            return scale * sum(_loss_sum(h, weight_VD, t) for h, t in _chunks(hidden_TD, targets_T, chunk))
        total = torch.zeros((), device=hidden_TD.device)
        grad_hidden, grad_weight_VD = [], None
        for hidden_cD, targets_c in _chunks(hidden_TD, targets_T, chunk):
            loss, grad_cV = _loss_and_gradient(hidden_cD @ weight_VD.t(), targets_c, scale)
            total = total + loss
            grad_hidden.append(grad_cV @ weight_VD)
            part_VD = grad_cV.t() @ hidden_cD
            grad_weight_VD = part_VD if grad_weight_VD is None else grad_weight_VD.float().add_(part_VD)
        grad_hidden_TD = grad_hidden[0] if len(grad_hidden) == 1 else torch.cat(grad_hidden)
        ctx.save_for_backward(grad_hidden_TD, grad_weight_VD.to(weight_VD.dtype))
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):
        grad_hidden_TD, grad_weight_VD = ctx.saved_tensors
        return grad_hidden_TD * grad, grad_weight_VD * grad, None, None, None


def _chunks(hidden_TD: Tensor, targets_T: Tensor, chunk: int):
    return zip(hidden_TD.split(chunk), targets_T.split(chunk), strict=True)


def _loss_sum(hidden_cD: Tensor, weight_VD: Tensor, targets_c: Tensor) -> Tensor:
    logits_cV = hidden_cD @ weight_VD.t()
    return torch.nn.functional.cross_entropy(logits_cV.float(), targets_c, ignore_index=IGNORED, reduction="sum")


def _loss_and_gradient(logits_cV: Tensor, targets_c: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """`scale` x the loss of a chunk, and the gradient of its logits in their dtype."""
    wide_cV = logits_cV.float()
    counted_c = targets_c != IGNORED
    index_c1 = targets_c.clamp_min(0).unsqueeze(1)
    logsumexp_c1 = wide_cV.logsumexp(1, keepdim=True)
    losses_c = (logsumexp_c1 - wide_cV.gather(1, index_c1)).squeeze(1)
    weights_c1 = (counted_c * scale).unsqueeze(1)
    grad_cV = (wide_cV - logsumexp_c1).exp_() * weights_c1
    grad_cV = grad_cV.scatter_add(1, index_c1, -weights_c1)
    return (losses_c * counted_c).sum() * scale, grad_cV.to(logits_cV.dtype)
