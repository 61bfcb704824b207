"""The optimizer of an experiment, and its state by weight."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from primus.config.schema import OptimizerConfig
from primus.frameworks.native.engine.compact_adam import CompactAdamW, get_local
from primus.frameworks.native.engine.model import Transformer
from primus.frameworks.native.engine.muon import Muon
from primus.frameworks.native.engine.placement import PlacedWeight
from primus.frameworks.native.training_settings import TrainingSettings

Weights = dict[str, PlacedWeight]
DEFAULTS = TrainingSettings()


def build_optimizer(
    model: Transformer, config: OptimizerConfig, settings: TrainingSettings = DEFAULTS
) -> torch.optim.Optimizer:
    """AdamW (arXiv 1711.05101) or another optimizer; matrices decay, norms and biases do not.

    Build it after `step.prepare_model`, which replaces the parameters of a sharded model.
    """
    weights = {name: weight for name, weight in model.place_weights().items() if weight.tensor.requires_grad}
    if settings.optimizer_cpu_offload:
        return HostOptimizer(weights, config, settings)
    matrices: Weights = {}
    if config.optimizer == "muon":
        inner = {name: weight for name, weight in weights.items() if name.startswith(("layers.", "predictions."))}
        matrices = {name: weight for name, weight in inner.items() if _decays(name, weight)}
    rest = _build_elementwise({name: each for name, each in weights.items() if name not in matrices}, config, settings)
    if not matrices:
        return rest
    dtype, stage = model.compute_dtype, model.layout.stage
    decay = config.weight_decay
    muon = Muon(matrices, model.spec, rest, settings, dtype=dtype, stage=stage, lr=config.lr, weight_decay=decay)
    fill_state(muon)
    return muon


def _build_elementwise(weights: Weights, config: OptimizerConfig, settings: TrainingSettings) -> torch.optim.Optimizer:
    """AdamW (arXiv 1711.05101) or SGD; the fused form scales and skips in the kernel."""
    groups: list[dict[str, Any]] = [
        {
            "params": [each.tensor for name, each in weights.items() if _decays(name, each) == decays],
            "lr": config.lr,
            "weight_decay": config.weight_decay if decays else 0.0,
        }
        for decays in (True, False)
    ]
    groups = [group for group in groups if group["params"]]
    if config.optimizer == "sgd":
        sgd = MomentumSGD([group | {"momentum": settings.sgd_momentum} for group in groups])
        fill_state(sgd)
        return sgd
    adam: dict[str, Any] = {"betas": (config.adam_beta1, config.adam_beta2), "eps": config.adam_eps}
    quantizes = config.optimizer == "adamw_8bit"
    if quantizes or settings.main_params_dtype == "bf16":
        placed = {each.tensor: (name, each) for name, each in weights.items()}
        compact = CompactAdamW([group | adam for group in groups], placed, quantizes=quantizes)
        fill_state(compact)
        return compact
    return torch.optim.AdamW(groups, config.lr, **adam, fused=True)


def _decays(name: str, weight: PlacedWeight) -> bool:
    # Biases of experts are stacked to matrices.
    return weight.tensor.ndim >= 2 and not name.endswith("bias")


class MomentumSGD(torch.optim.Optimizer):
    """torch.optim.SGD in its fused form, for sharded weights too, which that does not take (torch 2.13)."""

    grad_scale: Tensor | None = None
    found_inf: Tensor | None = None

    def __init__(self, groups: list[dict[str, Any]]) -> None:
        super().__init__(groups, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            used = [each for each in group["params"] if each.grad is not None]
            torch._fused_sgd_(
                [get_local(each) for each in used],
                [get_local(each.grad) for each in used],
                [get_local(self.state[each]["momentum_buffer"]) for each in used],
                lr=group["lr"],
                weight_decay=group["weight_decay"],
                momentum=group["momentum"],
                dampening=0.0,
                nesterov=False,
                maximize=False,
                is_first_step=False,  # the momenta begin as zeros, so that a first step may be skipped
                grad_scale=self.grad_scale,
                found_inf=self.found_inf,
            )


class HostOptimizer(torch.optim.Optimizer):
    """An optimizer whose weights and states are copies in the memory of the host, with which a step ends."""

    grad_scale: Tensor | None = None
    found_inf: Tensor | None = None

    def __init__(self, weights: Weights, config: OptimizerConfig, settings: TrainingSettings) -> None:
        self.weights = weights
        self.twins = {
            name: torch.empty_like(weight.local.detach(), device="cpu", pin_memory=weight.local.is_cuda)
            for name, weight in weights.items()
        }
        placed = {name: PlacedWeight(self.twins[name]) for name in weights}
        self.inner = _build_elementwise(placed, config, settings)
        super().__init__(self.inner.param_groups, {})
        self.state = self.inner.state

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for name, weight in self.weights.items():
            twin, gradient = self.twins[name], weight.tensor.grad
            if gradient is not None:
                # Copied each time: a checkpoint may have filled the weight since.
                twin.copy_(weight.local, non_blocking=True)
                twin.grad = weight.place(gradient).local.to("cpu", non_blocking=True)
        for name in ("grad_scale", "found_inf"):
            value = getattr(self, name)
            # Waits for the copies above too, which are in the same stream before it.
            setattr(self.inner, name, None if value is None else value.cpu())
        self.inner.step()
        for name, weight in self.weights.items():
            weight.local.copy_(self.twins[name], non_blocking=True)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.inner.zero_grad(set_to_none)
        for weight in self.weights.values():
            weight.tensor.grad = None


def fill_state(optimizer: torch.optim.Optimizer) -> None:
    """Create the states that are missing, as the first step does (torch/optim, `_init_group`)."""
    inner = optimizer.inner if isinstance(optimizer, HostOptimizer) else optimizer
    for group in inner.param_groups:
        for parameter in group["params"]:
            if inner.state[parameter]:
                continue
            if isinstance(inner, CompactAdamW):
                inner.state[parameter] = inner.create_state(parameter)
                continue
            names = ("exp_avg", "exp_avg_sq") if "betas" in group else ("momentum_buffer",)
            state = {name: torch.zeros_like(parameter, memory_format=torch.preserve_format) for name in names}
            if "betas" in group:
                state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
            inner.state[parameter] = state


def read_state(optimizer: torch.optim.Optimizer, name: str, weight: PlacedWeight) -> Mapping[str, Tensor]:
    """The state of a weight, with moments of its shape: in place, but those of 8 bits are copies."""
    if isinstance(optimizer, HostOptimizer):
        return read_state(optimizer.inner, name, PlacedWeight(optimizer.twins[name]))
    state = optimizer.state[weight.tensor]
    return optimizer.unpack(state, weight.tensor) if isinstance(optimizer, CompactAdamW) else state


def write_state(optimizer: torch.optim.Optimizer, name: str, weight: PlacedWeight, state: Mapping[str, Tensor]) -> None:
    """Take over what `read_state` gave copies of."""
    if isinstance(optimizer, HostOptimizer):
        write_state(optimizer.inner, name, PlacedWeight(optimizer.twins[name]), state)
    elif isinstance(optimizer, CompactAdamW):
        kept = optimizer.state[weight.tensor]
        for key, tensor in optimizer.pack(state).items():
            kept[key].copy_(tensor)


def name_optimizer(optimizer: torch.optim.Optimizer) -> str:
    """In the words of the schema."""
    inner = optimizer.inner if isinstance(optimizer, HostOptimizer) else optimizer
    if isinstance(inner, CompactAdamW):
        return "adamw_8bit" if inner.quantizes else "adamw"
    return {Muon: "muon", MomentumSGD: "sgd"}.get(type(inner), "adamw")
