"""The norm of a float32 tensor on a CPU, added up row by row.

PyTorch adds it up in as many partial sums as a vector register has elements, and loses 1e-5 of the norm of 1 M random
elements, and 2e-4 of 7 M (aten/src/ATen/native/cpu/ReduceOpsKernel.cpp, norm_kernel_cpu_impl). Engines clip and report
the norm of gradients, so that they would differ from each other, and with the number of processes. Rows take no longer.
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
    reason="the norm of a large float32 tensor on a CPU loses digits, by which engines clip gradients",
    link="https://github.com/pytorch/pytorch/blob/v2.13.0/aten/src/ATen/native/cpu/ReduceOpsKernel.cpp",
    expires=date(2027, 6, 30),
    backend=("torchtitan", "megatron", "megatron_bridge"),
)

ROW_ELEMENTS = 2**12
_libraries: list[Any] = []
"""What keeps the kernel in place."""


def apply() -> None:
    """Replace the kernel of `torch.linalg.vector_norm` for CPUs, which `torch.norm` and `torch._foreach_norm` call.

    DTensors call it for the local part of each process.
    """
    import torch

    if _libraries:
        return
    new_library: Any = torch.library.Library
    _libraries.append(new_library("aten", "IMPL"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about the kernel that is replaced, which is intended
        _libraries[0].impl("linalg_vector_norm", compute_norm, "CPU")


def compute_norm(
    tensor: Tensor, order: Any = 2, dim: Any = None, keepdim: bool = False, *, dtype: Any = None
) -> Tensor:
    """As `torch.linalg.vector_norm`; the variant with `out` is PyTorch's own kernel."""
    import torch

    kind = dtype or tensor.dtype
    is_replaced = order == 2 and dim is None and tensor.numel() > ROW_ELEMENTS and not keepdim
    if not is_replaced or tensor.dtype != torch.float32 or kind != torch.float32:
        result = tensor.new_empty(0, dtype=kind.to_real())
        torch.linalg.vector_norm(tensor, order, dim, keepdim, dtype=dtype, out=result)
        return result
    flat = tensor.reshape(-1)
    whole = flat.numel() // ROW_ELEMENTS
    rows = flat[: whole * ROW_ELEMENTS].view(whole, ROW_ELEMENTS)
    norms = torch.linalg.vector_norm(rows, dim=1, out=flat.new_empty(0))
    parts = torch.cat([norms, flat[whole * ROW_ELEMENTS :]])
    total = parts.new_empty(0, dtype=torch.float64)
    torch.linalg.vector_norm(parts, dtype=torch.float64, out=total)
    return total.to(torch.float32)
