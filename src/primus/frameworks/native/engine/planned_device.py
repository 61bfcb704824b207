"""The operators of an accelerator where there is none: a fake run takes its branches with tensors of the CPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Literal

import torch
from torch import Tensor

Plan = Literal["eager", "compiled"]
"""How an accelerator would run the layers."""
_PLAN: ContextVar[Plan | None] = ContextVar("_PLAN", default=None)


@contextmanager
def plan_accelerator(plan: Plan | None) -> Iterator[None]:
    """Within it, tensors of the CPU stand for those of an accelerator; nothing changes if None."""
    token = _PLAN.set(plan)
    try:
        yield
    finally:
        _PLAN.reset(token)


def is_on_cpu(x: Tensor) -> bool:
    """Whether `x` is computed by a CPU."""
    return x.device.type == "cpu" and _PLAN.get() is None


def is_eager_on_cpu(x: Tensor) -> bool:
    """Whether operators with derivatives of their own run: the compiler fuses plain formulas itself.

    What it keeps for the backward pass is as little as they do, so that they stand for a planned compiled layer.
    """
    return x.device.type == "cpu" and not torch.compiler.is_compiling() and _PLAN.get() != "eager"
