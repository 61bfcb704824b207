"""The logarithm of softmax over a large vocabulary in float32 on a CPU, whose probabilities add up to 1.

PyTorch adds up the exponentials of a row in as many partial sums as a vector register has elements
(aten/src/ATen/native/cpu/SoftMaxKernel.cpp). The logits of trained models differ more than random ones: their cross
entropy is then off by 3e-6, which is more than engines that train alike differ by.
"""

from __future__ import annotations

import warnings
from datetime import date
from typing import TYPE_CHECKING, Any

from primus.patch import Patch

if TYPE_CHECKING:
    from torch import Tensor

PATCH = Patch(
    target="torch",
    versions=">=2.6,<2.14",
    reason="the cross entropy of trained models in float32 on a CPU is off by 3e-6",
    link="https://github.com/pytorch/pytorch/blob/v2.13.0/aten/src/ATen/native/cpu/SoftMaxKernel.cpp",
    expires=date(2027, 6, 30),
    backend=("torchtitan", "huggingface"),
)

PART = 512
"""Elements of a row that are added up in float32."""
ROWS = 64
"""Rows that are corrected at once, so that their exponentials stay in the cache."""
_libraries: list[Any] = []
"""What keeps the kernel in place."""


def apply() -> None:
    """Replace the kernel of `torch.log_softmax` for CPUs, which `torch.nn.functional.cross_entropy` calls."""
    import torch

    if _libraries:
        return
    new_library: Any = torch.library.Library
    _libraries.append(new_library("aten", "IMPL"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about the kernel that is replaced, which is intended
        _libraries[0].impl("_log_softmax", compute_log_softmax, "CPU")


def compute_log_softmax(logits: Tensor, dim: int, half_to_float: bool) -> Tensor:
    """As `torch.log_softmax`; the variant with `out` is PyTorch's own kernel, whose rows are corrected by their sum."""
    import torch

    found = torch.empty_like(logits, memory_format=torch.contiguous_format)
    torch.ops.aten._log_softmax.out(logits, dim, half_to_float, out=found)
    is_last = logits.dim() > 0 and dim % logits.dim() == logits.dim() - 1
    if not is_last or logits.dtype != torch.float32 or logits.shape[-1] < PART:
        return found
    rest = logits.shape[-1] % PART
    for rows in torch.split(found.view(-1, logits.shape[-1]), ROWS):
        exponentials = rows.exp()
        parts = exponentials[:, rest:].reshape(len(rows), -1, PART).sum(2).double().sum(1, keepdim=True)
        rows -= (parts + exponentials[:, :rest].sum(1, keepdim=True)).log().float()
    return found
