"""The gated feed-forwards of experts over rows that are sorted by expert, as one autograd Function.

Its products are two operators, which the compiler leaves alone: how many rows an expert has is known only at run time.

Shape suffixes: R rows, E experts, D model width, F width of an expert, G = 2 F (gates, then what they gate), I and O
any widths.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from primus.frameworks.native.engine import ops

GATE_SLOPE = 1.702
"""Of the clamped SwiGLU (openai/gpt-oss, gpt_oss/torch/model.py, `swiglu`)."""


@torch.library.custom_op("primus::grouped_product", mutates_args=())
def multiply_groups(rows_RI: Tensor, weights_EIO: Tensor, counts_E: Tensor) -> Tensor:
    """Rows times the matrix of their expert, [R, O]; the first `counts_E[0]` rows belong to expert 0, and so on."""
    if _has_grouped_kernel(rows_RI):
        return F.grouped_mm(rows_RI, weights_EIO, offs=_find_ends(counts_E))
    out_RO = rows_RI.new_empty(rows_RI.shape[0], weights_EIO.shape[2])
    for expert, rows in _iterate_groups(counts_E):
        torch.mm(rows_RI[rows], weights_EIO[expert], out=out_RO[rows])
    return out_RO


@multiply_groups.register_fake
def _(rows_RI: Tensor, weights_EIO: Tensor, counts_E: Tensor) -> Tensor:
    return rows_RI.new_empty(rows_RI.shape[0], weights_EIO.shape[2])


@torch.library.custom_op("primus::grouped_outer_product", mutates_args=())
def sum_outer_products(left_RI: Tensor, right_RO: Tensor, counts_E: Tensor) -> Tensor:
    """The sum over each expert's rows of left^T right, [E, I, O]: zeros for an expert without rows."""
    if _has_grouped_kernel(left_RI):
        return F.grouped_mm(left_RI.t(), right_RO, offs=_find_ends(counts_E))
    out_EIO = left_RI.new_empty(counts_E.shape[0], left_RI.shape[1], right_RO.shape[1])
    for expert, rows in _iterate_groups(counts_E):
        torch.mm(left_RI[rows].t(), right_RO[rows], out=out_EIO[expert])
    return out_EIO


@sum_outer_products.register_fake
def _(left_RI: Tensor, right_RO: Tensor, counts_E: Tensor) -> Tensor:
    return left_RI.new_empty(counts_E.shape[0], left_RI.shape[1], right_RO.shape[1])


def _has_grouped_kernel(x: Tensor) -> bool:
    # Elsewhere torch's grouped_mm is a loop that is slower than this one, or refuses the dtype.
    return x.device.type == "cuda" and x.dtype == torch.bfloat16


def _find_ends(counts_E: Tensor) -> Tensor:
    return counts_E.cumsum(0).to(torch.int32)


def _iterate_groups(counts_E: Tensor) -> list[tuple[int, slice]]:
    ends = counts_E.cumsum(0).tolist()
    return [(expert, slice(start, end)) for expert, (start, end) in enumerate(zip([0, *ends], ends, strict=False))]


def run_experts(
    rows_RD: Tensor,
    scores_R: Tensor,
    counts_E: Tensor,
    gate_up_EGD: Tensor,
    down_EDF: Tensor,
    gate_up_bias_EG: Tensor | None = None,
    down_bias_ED: Tensor | None = None,
    clamp: float | None = None,
) -> Tensor:
    """Each row through its expert, times its score: [R, D].

    Args:
        rows_RD: Rows sorted by expert.
        scores_R: Scores of the router.
        counts_E: Rows of each expert, int64.
        gate_up_EGD: First matrices.
        down_EDF: Second matrices.
        gate_up_bias_EG: Biases of the first.
        down_bias_ED: Biases of the second.
        clamp: Limit of the clamped SwiGLU.
    """
    if gate_up_bias_EG is not None and down_bias_ED is not None:
        expert_R = torch.repeat_interleave(counts_E, output_size=rows_RD.shape[0])
        gate_up_bias_EG, down_bias_ED = gate_up_bias_EG[expert_R], down_bias_ED[expert_R]
    return _Experts.apply(rows_RD, scores_R, counts_E, gate_up_EGD, down_EDF, gate_up_bias_EG, down_bias_ED, clamp)


class _Experts(torch.autograd.Function):
    """Keeps the rows and the result of the first product; the activation is computed again in the backward pass.

    The score multiplies the activation instead of the result, so that its derivative needs no copy of the result.
    """

    @staticmethod
    def forward(ctx, rows_RD, scores_R, counts_E, gate_up_EGD, down_EDF, gate_up_bias_RG, down_bias_RD, clamp):
        gated_RG = multiply_groups(rows_RD, gate_up_EGD.mT, counts_E)
        if gate_up_bias_RG is not None:
            gated_RG += gate_up_bias_RG
        scores_R1 = scores_R.unsqueeze(1).to(rows_RD.dtype)
        hidden_RF = activate(gated_RG, clamp).mul_(scores_R1)
        out_RD = multiply_groups(hidden_RF, down_EDF.mT, counts_E)
        if down_bias_RD is not None:
            out_RD += down_bias_RD * scores_R1
        ctx.save_for_backward(rows_RD, scores_R, counts_E, gate_up_EGD, down_EDF, down_bias_RD, gated_RG)
        ctx.clamp = clamp
        return out_RD

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_RD: Tensor) -> Any:
        rows_RD, scores_R, counts_E, gate_up_EGD, down_EDF, down_bias_RD, gated_RG = ctx.saved_tensors
        scores_R1 = scores_R.unsqueeze(1).to(rows_RD.dtype)
        grad_RD = grad_RD.contiguous()
        grad_hidden_RF = multiply_groups(grad_RD, down_EDF, counts_E)
        hidden_RF = activate(gated_RG, ctx.clamp)
        grad_scores_R = _multiply_rows(grad_hidden_RF, hidden_RF)
        grad_down_EDF = sum_outer_products(grad_RD, hidden_RF.mul_(scores_R1), counts_E)
        grad_gated_RG = derive_activation(grad_hidden_RF.mul_(scores_R1), gated_RG, ctx.clamp)
        grad_rows_RD = multiply_groups(grad_gated_RG, gate_up_EGD, counts_E)
        grad_gate_up_EGD = sum_outer_products(grad_gated_RG, rows_RD, counts_E)
        grads = (grad_rows_RD, grad_scores_R, None, grad_gate_up_EGD, grad_down_EDF)
        if down_bias_RD is None:
            return *grads, None, None, None
        grad_scores_R = grad_scores_R + _multiply_rows(grad_RD, down_bias_RD)
        return grad_rows_RD, grad_scores_R, *grads[2:], grad_gated_RG, grad_RD * scores_R1, None


def _multiply_rows(left: Tensor, right: Tensor) -> Tensor:
    """Inner products of rows, in float32 or wider."""
    return (left * right).sum(1, dtype=ops.choose_wide_dtype(left.dtype))


def activate(gated_RG: Tensor, clamp: float | None) -> Tensor:
    """silu(gate) x up; clamped, (up + 1) x gate x sigmoid(1.702 gate) of gates <= clamp and |up| <= clamp."""
    gate, up = gated_RG.chunk(2, -1)
    if clamp is None:
        return F.silu(gate).mul_(up)
    gate, up = gate.clamp(max=clamp), up.clamp(-clamp, clamp)
    return (up + 1) * gate * torch.sigmoid(GATE_SLOPE * gate)


def derive_activation(grad_RF: Tensor, gated_RG: Tensor, clamp: float | None) -> Tensor:
    """Gradient of `activate` with respect to its input."""
    if clamp is None:
        return ops.derive_swiglu(grad_RF, gated_RG)
    gate, up = gated_RG.chunk(2, -1)
    is_gate_free, is_up_free = gate <= clamp, up.abs() <= clamp
    gate, up = gate.clamp(max=clamp), up.clamp(-clamp, clamp)
    opened = torch.sigmoid(GATE_SLOPE * gate)
    slope = opened * (1 + GATE_SLOPE * gate * (1 - opened))
    return torch.cat((grad_RF * (up + 1) * slope * is_gate_free, grad_RF * gate * opened * is_up_free), -1)
