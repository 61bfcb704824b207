"""The operators of an accelerator where there is none: a fake run takes its branches with tensors of the CPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

import torch
from torch import Tensor

Plan = Literal["eager", "compiled"]
"""How an accelerator would run the layers."""
_plan: Plan | None = None
"""Of this process; the compiler can read a global of a module, but no ContextVar."""


@contextmanager
def plan_accelerator(plan: Plan | None) -> Iterator[None]:
    """Within it, tensors of the CPU stand for those of an accelerator; nothing changes if None."""
    global _plan
    _plan, before = plan, _plan
    try:
        yield
    finally:
        _plan = before


def is_on_cpu(x: Tensor) -> bool:
    """Whether `x` is computed by a CPU."""
    return x.device.type == "cpu" and _plan is None


def is_eager_on_cpu(x: Tensor) -> bool:
    """Whether operators with derivatives of their own run: the compiler fuses plain formulas itself.

    What it keeps for the backward pass is as little as they do, so that they stand for a planned compiled layer.
    """
    return x.device.type == "cpu" and not torch.compiler.is_compiling() and _plan != "eager"
