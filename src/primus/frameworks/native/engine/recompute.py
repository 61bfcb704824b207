"""Which activations of a layer are kept until its backward pass, and where: here, on the host, or computed again."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from primus.frameworks.native.engine import experts
from primus.frameworks.native.training_settings import TrainingSettings

aten = torch.ops.aten
ATTENTION = (
    aten._scaled_dot_product_flash_attention.default,
    aten._scaled_dot_product_flash_attention_for_cpu.default,
    aten._scaled_dot_product_efficient_attention.default,
    aten._scaled_dot_product_cudnn_attention.default,
)
"""Kernels whose result is always kept: they cost most for each byte of it."""
PRODUCTS = {
    aten.mm.default: 0,
    aten._scaled_mm.default: 0,
    aten.bmm.default: 0,
    aten.addmm.default: 1,
    experts.multiply_groups._opoverload: 0,
}
"""Products, with the place of their left matrix among the arguments."""


@dataclass(frozen=True)
class ActivationMemory:
    """What a model does about the activations of its layers.

    Args:
        granularity: `full` keeps the input of a layer only, `selective` also what costs most to compute for its size.
        num_layers: The number of layers that this concerns, the first ones; all when None.
        modules: With `selective`, what is computed again instead, see `recompute_modules`.
        is_offloaded: Whether what is kept moves to the memory of the host.
    """

    granularity: Literal["full", "selective"] | None = None
    num_layers: int | None = None
    modules: tuple[str, ...] = ()
    is_offloaded: bool = False

    def run_layer(self, index: int, layer: nn.Module, *args: Any) -> Tensor:
        """The result of the layer with this number in its stage."""
        with HostOffload() if self.is_offloaded else nullcontext():
            is_left_out = self.num_layers is not None and index >= self.num_layers
            if self.granularity is None or self.modules or is_left_out:
                return layer(*args)
            if self.granularity == "full":
                return checkpoint(layer, *args, use_reentrant=False)
            contexts = partial(create_selective_checkpoint_contexts, _choose_policy)
            return checkpoint(layer, *args, use_reentrant=False, context_fn=contexts)


def build_activation_memory(settings: TrainingSettings, recomputes_all: bool) -> ActivationMemory | None:
    """That of an experiment; None if everything is kept on the device."""
    granularity = "full" if recomputes_all else settings.recompute_granularity
    if granularity is None and not settings.cpu_offloading:
        return None
    return ActivationMemory(
        granularity, settings.recompute_num_layers, settings.recompute_modules, settings.cpu_offloading
    )


def recompute_modules(layer: nn.Module, names: tuple[str, ...]) -> None:
    """Compute modules of a `TransformerLayer` again in the backward pass, by Megatron-LM's names of them."""
    children = dict(layer.named_modules())
    found = {
        "layernorm": ["attention_norm", "feed_forward_norm"],
        "moe" if "feed_forward.experts" in children else "mlp": ["feed_forward"],
        "shared_experts": ["feed_forward.shared"],
    }
    for module in (children[path] for name in names for path in found.get(name, ()) if path in children):
        module.forward = partial(checkpoint, module.forward, use_reentrant=False)


class HostOffload(saved_tensors_hooks):
    """Within it, what the backward pass needs is copied to the host, except weights and integers.

    The copies are in the order of the device's stream: the host does not wait for them, the device does.
    """

    def __init__(self) -> None:
        super().__init__(_move_to_host, _move_back)


def _move_to_host(tensor: Tensor) -> Tensor | tuple[torch.device, Tensor]:
    if isinstance(tensor, nn.Parameter) or isinstance(tensor._base, nn.Parameter) or not tensor.is_floating_point():
        return tensor
    # From pinned memory only is a copy asynchronous.
    host = torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda)
    return tensor.device, host.copy_(tensor, non_blocking=True)


def _move_back(kept: Tensor | tuple[torch.device, Tensor]) -> Tensor:
    return kept if isinstance(kept, Tensor) else kept[1].to(kept[0], non_blocking=True)


def _choose_policy(_: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Keep attention, and products whose result is not wider than their input: they cost more for each byte.

    A product of [R, K] by [K, M] takes 2 K operations for each number of its result, whatever M is; so what widens the
    most (queries, keys and values; gate and up) has the most bytes to save, and is computed again.
    """
    if operator in ATTENTION:
        return CheckpointPolicy.MUST_SAVE
    left = PRODUCTS.get(operator)
    if left is not None and args[left + 1].shape[-1] <= args[left].shape[-1]:
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE
