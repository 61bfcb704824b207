"""Matrix products in 8-bit floating point, with scales of the tensors as they are in each step.

Format and recipes are Megatron-LM's: `e4m3`, or `hybrid`, where gradients have e5m2's wider range; a scale for each
matrix (tensorwise) or for each of its rows along the sum (rowwise). Weights, sums and all other operators keep theirs.

Shape suffixes: T tokens, I inputs, O outputs, K elements of a sum.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from primus.errors import UnfitError
from primus.frameworks.native.kernel_settings import FP8_MULTIPLE

SMALLEST_SCALE = 1e-12
"""Of a matrix of zeros."""


@dataclass(frozen=True)
class Float8:
    """How products are computed.

    Args:
        forward: Dtype of weights and activations.
        backward: Dtype of gradients.
        is_rowwise: A scale for each row.
    """

    forward: torch.dtype
    backward: torch.dtype
    is_rowwise: bool

    def multiply(self, x: Tensor, weight_OI: Tensor) -> Tensor:
        """x weight^T, [..., O], in the dtype of `x`, as are both gradients."""
        return _Product.apply(x.flatten(0, -2), weight_OI, self).unflatten(0, x.shape[:-1])


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TI: Tensor, weight_OI: Tensor, recipe: Float8) -> Tensor:
        ctx.save_for_backward(x_TI, weight_OI)
        ctx.recipe = recipe
        return _multiply(x_TI, weight_OI, recipe.forward, recipe)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_TO: Tensor) -> Any:
        (x_TI, weight_OI), recipe = ctx.saved_tensors, ctx.recipe
        grad_x = _multiply(grad_TO, weight_OI.t(), recipe.backward, recipe) if ctx.needs_input_grad[0] else None
        grad_weight = _multiply(grad_TO.t(), x_TI.t(), recipe.backward, recipe) if ctx.needs_input_grad[1] else None
        return grad_x, grad_weight, None


def _multiply(left_TK: Tensor, right_OK: Tensor, dtype: torch.dtype, recipe: Float8) -> Tensor:
    """left right^T in the dtype of `left`; its numbers have `dtype`, those of `right` that of the forward pass."""
    left, left_scale = _quantize(left_TK, dtype, recipe.is_rowwise)
    right, right_scale = _quantize(right_OK, recipe.forward, recipe.is_rowwise)
    return torch._scaled_mm(
        left, right.t(), scale_a=left_scale, scale_b=right_scale.t().contiguous(), out_dtype=left_TK.dtype
    )


def _quantize(x_TK: Tensor, dtype: torch.dtype, is_rowwise: bool) -> tuple[Tensor, Tensor]:
    """Numbers, and their scale [T, 1] or [1, 1] with which they are multiplied."""
    wide, most = x_TK.float(), torch.finfo(dtype).max
    largest = wide.abs().amax(1, keepdim=True) if is_rowwise else wide.abs().amax().view(1, 1)
    scale = largest.div(most).clamp_min(SMALLEST_SCALE)
    # Clamped, since a rounded scale may leave the largest number above the range, where e4m3 has only NaN.
    return (wide / scale).clamp(-most, most).to(dtype).contiguous(), scale


def choose_format(asked: Literal["e4m3", "hybrid"], recipe: str, device: torch.device) -> Float8:
    """The format of an experiment on a device.

    Raises:
        UnfitError: The device has no such products.
    """
    properties = torch.cuda.get_device_properties(device) if device.type == "cuda" else None
    found = Float8(*choose_dtypes(asked, getattr(properties, "gcnArchName", "")), recipe == "rowwise")
    ones = torch.ones(FP8_MULTIPLE, FP8_MULTIPLE, dtype=torch.bfloat16, device=device)
    try:
        _multiply(ones, ones, found.backward, found)
    except RuntimeError as error:
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else "the CPU"
        reason = str(error).splitlines()[0]
        raise UnfitError(
            f"fp8: {asked}, fp8_recipe: {recipe}: {name} has no such products: {reason}",
            "set fp8: null, or train on NVIDIA GPUs from compute capability 8.9 or AMD Instinct MI300 on",
        ) from None
    return found


def choose_dtypes(asked: Literal["e4m3", "hybrid"], architecture: str) -> tuple[torch.dtype, torch.dtype]:
    """Of the forward pass and of gradients; gfx940 to gfx942 have formats of their own, without negative zero."""
    narrow, wide = torch.float8_e4m3fn, torch.float8_e5m2
    if architecture.startswith("gfx94"):
        narrow, wide = torch.float8_e4m3fnuz, torch.float8_e5m2fnuz
    return narrow, wide if asked == "hybrid" else narrow
