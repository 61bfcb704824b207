"""AdamW with small states: weights and moments in bfloat16 that are rounded at random, or moments of 8 bits."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from primus.frameworks.native.engine.placement import PlacedWeight

MOMENTS = ("exp_avg", "exp_avg_sq")
CODES, SCALES = "_codes", "_scales"
"""Ends of the names of a moment of 8 bits."""
BLOCK = 256
"""Consecutive elements of a moment that share a scale (torchao's block size for 8 bits)."""
MIN_QUANTIZED = 4096
"""Smaller weights have float32 moments, as in torchao and bitsandbytes."""


class CompactAdamW(torch.optim.Optimizer):
    """AdamW that computes in float32 and keeps its states in less.

    A bfloat16 weight has moments in bfloat16, and no float32 copy. What is stored is rounded up or down at random, with
    probabilities that keep its mean: an update below half a unit in the last place would otherwise be lost (arXiv
    2010.06192). The random bits depend on the step, the name of the weight and the place in the whole weight, so that
    replicas stay equal and a resumed run repeats.

    Like a fused optimizer it divides gradients by `grad_scale`, and changes nothing if `found_inf` is 1.

    Args:
        groups: Parameters, with lr, betas, eps and weight_decay.
        weights: Name and place of each of them.
        quantizes: Whether moments have 8 bits.
    """

    grad_scale: Tensor | None = None
    found_inf: Tensor | None = None

    def __init__(self, groups: Any, weights: Mapping[Tensor, tuple[str, PlacedWeight]], *, quantizes: bool) -> None:
        super().__init__(groups, {})
        self.quantizes = quantizes
        self._weights = weights

    def create_state(self, parameter: Tensor) -> dict[str, Tensor]:
        """That of a weight before its first step."""
        local, step = get_local(parameter), torch.zeros((), dtype=torch.float32, device=parameter.device)
        dtype = torch.float32 if self.quantizes else local.dtype
        return self.pack({"step": step} | {each: torch.zeros_like(local, dtype=dtype) for each in MOMENTS})

    def pack(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The state of a weight in the form in which it is kept."""
        packed = {}
        for name, tensor in state.items():
            if name in MOMENTS and self.quantizes and tensor.numel() >= MIN_QUANTIZED:
                packed[name + CODES], packed[name + SCALES] = quantize(tensor, has_sign=name == MOMENTS[0])
            else:
                packed[name] = tensor
        return packed

    def unpack(self, state: Mapping[str, Tensor], like: Tensor) -> dict[str, Tensor]:
        """The state of the weight `like` with moments of its shape; those of 8 bits are copies."""
        shape, unpacked = get_local(like).shape, {}
        for name, tensor in state.items():
            if name.endswith(CODES):
                moment = name.removesuffix(CODES)
                unpacked[moment] = dequantize(tensor, state[moment + SCALES], moment == MOMENTS[0])[
                    : shape.numel()
                ].view(shape)
            elif not name.endswith(SCALES):
                unpacked[name] = tensor
        return unpacked

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, group)

    def _update(self, parameter: Tensor, group: Mapping[str, Any]) -> None:
        name, weight = self._weights[parameter]
        local, packed = get_local(parameter), self.state[parameter]
        state = self.unpack(packed, parameter)
        gradient = get_local(parameter.grad).float() / (1.0 if self.grad_scale is None else self.grad_scale)
        (beta1, beta2), step = group["betas"], state["step"] + 1
        # torch's order of operations (torch/optim/adam.py, _single_tensor_adam).
        first = state[MOMENTS[0]].float().lerp(gradient, 1 - beta1)
        second = (state[MOMENTS[1]].float() * beta2).addcmul_(gradient, gradient, value=1 - beta2)
        denominator = (second / (1 - beta2**step)).sqrt_().add_(group["eps"])
        wide = local.float() * (1 - group["lr"] * group["weight_decay"])
        wide -= first / denominator * (group["lr"] / (1 - beta1**step))
        found = self.pack({"step": step, MOMENTS[0]: first, MOMENTS[1]: second})
        pairs = [(local, wide), *((packed[each], tensor) for each, tensor in found.items())]
        place = _number_elements(weight.place(torch.empty_like(local, dtype=torch.int32)))
        for number, (target, value) in enumerate(pairs):
            if target.dtype == torch.bfloat16:
                salt = zlib.crc32(f"{name} {number}".encode()) & 0x7FFFFFFF
                value = round_at_random(value, _mix(place + (step.to(torch.int32) * 0x3C6EF372 + salt)))
            target.copy_(value if self.found_inf is None else torch.where(self.found_inf > 0, target, value))


def round_at_random(wide: Tensor, random: Tensor) -> Tensor:
    """float32 to bfloat16, the upper 16 bits: up if the lower ones are more than 16 bits of `random` are."""
    bits = (wide.view(torch.int32) + (random & 0xFFFF)) & -0x10000
    return torch.where(wide.isfinite(), bits.view(torch.float32), wide).to(torch.bfloat16)


def quantize(tensor: Tensor, has_sign: bool) -> tuple[Tensor, Tensor]:
    """Codes of 8 bits [blocks, BLOCK], and the scale of each block (arXiv 2110.02861)."""
    blocks = torch.nn.functional.pad(tensor.flatten(), (0, -tensor.numel() % BLOCK)).view(-1, BLOCK)
    scales = blocks.abs().amax(1, keepdim=True)
    values = _list_values(has_sign).to(tensor.device)
    middles = (values[1:] + values[:-1]) / 2
    return torch.bucketize(blocks / scales.clamp_min(torch.finfo(scales.dtype).tiny), middles).to(torch.uint8), scales


def dequantize(codes: Tensor, scales: Tensor, has_sign: bool) -> Tensor:
    """The values of a tensor, flat, with those that fill the last block. To quantize them again gives the same codes,
    since each block has an element that is its scale."""
    return (_list_values(has_sign).to(codes.device)[codes.long()] * scales).flatten()


@cache
def _list_values(has_sign: bool) -> Tensor:
    """What the 256 codes stand for: seven decades, each with twice as many values as the one below (dynamic tree
    quantization, arXiv 2110.02861, section 1.3; bitsandbytes.functional.create_dynamic_map).

    With a sign the lowest is -1 instead of -0.993, so that a block whose largest element is negative has it exactly.
    """
    values = [0.0, 1.0]
    for decade in range(7):
        edges = torch.linspace(0.1, 1, 2 ** (decade + (0 if has_sign else 1)) + 1, dtype=torch.float64)
        middles = ((edges[1:] + edges[:-1]) / 2 * 10.0 ** (decade - 6)).tolist()
        values += [*middles, *(-each for each in middles if has_sign)]
    found = torch.tensor(sorted(values), dtype=torch.float32)
    if has_sign:
        found[0] = -1.0
    return found


def get_local(tensor: Tensor | None) -> Tensor:
    """The part of this process."""
    assert tensor is not None
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _number_elements(weight: PlacedWeight) -> Tensor:
    """The place of each element of this process in the whole weight, modulo 2^32, in its order of rows."""
    strides = torch.empty(weight.shape, device="meta").stride()
    for local, offsets in weight.list_pieces():
        local.zero_()
        for dim, (size, offset, stride) in enumerate(zip(local.shape, offsets, strides, strict=True)):
            places = torch.arange(offset, offset + size, dtype=torch.int64, device=local.device) * stride
            local += places.to(torch.int32).view([-1 if each == dim else 1 for each in range(local.dim())])
    return weight.local


def _mix(x: Tensor) -> Tensor:
    """A hash of 32 bits, in place (lowbias32, github.com/skeeto/hash-prospector); >> of an int32 keeps its sign."""
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B - 2**32), (16, 1)):
        x ^= (x >> shift) & ((1 << (32 - shift)) - 1)
        x *= factor
    return x
