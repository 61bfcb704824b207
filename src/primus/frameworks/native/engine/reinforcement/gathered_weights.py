"""Weights of a sharded model that each process has whole, while processes make different numbers of passes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn
from torch.distributed.fsdp import FSDPModule


@contextmanager
def gather_weights(model: nn.Module) -> Iterator[None]:
    """Gather the weights once, and keep them until the end of the `with`; every process must call this.

    Passes then exchange nothing. It costs the memory of all weights in the dtype of the passes.
    """
    sharded = [module for module in model.modules() if isinstance(module, FSDPModule)]
    for module in sharded:
        module.set_reshard_after_forward(False, recurse=False)
        module.unshard()
    try:
        yield
    finally:
        for module in sharded:
            module.reshard()
            # FSDP2's own default: the root keeps its weights for the backward pass, the others do not.
            module.set_reshard_after_forward(module is not model, recurse=False)
