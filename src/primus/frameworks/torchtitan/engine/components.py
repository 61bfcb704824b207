"""Parts of the trainer that primus replaces: data, tokenizer, learning rate, optimizer step and metrics."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.components.optimizer import LRSchedulersContainer, OptimizersContainer, ParamGroupConfig
from torchtitan.components.tokenizer import BaseTokenizer

from primus.checkpoint.training_state import ParamGroup

ParamGroups = tuple[dict[str, list[ParamGroup]], dict[str, list[str]]]
"""Groups, and the names of their parameters, by the name of an optimizer."""


class UnusedTokenizer(BaseTokenizer):
    """Stands where the trainer insists on a tokenizer; batches arrive as tokens."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        """No options."""

    def __init__(self, config: Config, *, tokenizer_path: str, **options: Any) -> None:
        super().__init__()

    def encode(self, *args: Any, **options: Any) -> list[int]:
        raise NotImplementedError("batches arrive as tokens")

    def decode(self, *args: Any, **options: Any) -> str:
        raise NotImplementedError("batches arrive as tokens")

    def get_vocab_size(self) -> int:
        raise NotImplementedError("batches arrive as tokens")


class UnusedDataLoader(BaseDataLoader):
    """Stands where the trainer insists on a loader; tells the data-parallel rank that it was given."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        """No options."""

    def __init__(self, config: Config, *, dp_world_size: int, dp_rank: int, **options: Any) -> None:
        self.data_rank, self.data_size = dp_rank, dp_world_size

    def __iter__(self) -> Iterator[tuple[dict[str, Tensor], Tensor]]:
        return iter(())

    def state_dict(self) -> dict[str, int]:
        return {}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Nothing to restore: primus counts the samples."""


class StepRateSchedule(LRSchedulersContainer):
    """The learning rate that the caller sets before each step, in place of a schedule."""

    @dataclass(kw_only=True, slots=True)
    class Config(LRSchedulersContainer.Config):
        """Options are those of torchtitan's own schedule, which this one does not read."""

        def build(self, *, optimizers: OptimizersContainer, training_steps: int) -> StepRateSchedule:
            return StepRateSchedule(optimizers)

    def __init__(self, optimizers: OptimizersContainer) -> None:
        self.schedulers: list[Any] = []
        self.steps = 0
        self._optimizers = optimizers
        self._peaks = [group["lr"] for group in self._list_groups()]

    def set_rate(self, rate: float, peak: float) -> None:
        """Use `rate` in the next step; a group whose own peak is not `peak` keeps its proportion to it."""
        for group, own in zip(self._list_groups(), self._peaks, strict=True):
            group["lr"] = rate if own == peak else rate / peak * own

    def get_metrics(self) -> dict[str, float]:
        return {f"lr/{index}": float(group["lr"]) for index, group in enumerate(self._list_groups())}

    def step(self) -> None:
        self.steps += 1

    def state_dict(self) -> dict[str, int]:
        return {"last_epoch": self.steps}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.steps = int(state["last_epoch"])

    def _list_groups(self) -> list[ParamGroup]:
        # Asked for each time: an optimizer that loads its state replaces them.
        return [group for optimizer in self._optimizers for group in optimizer.param_groups]


class CheckedOptimizers(OptimizersContainer):
    """Skips a step whose gradient is not finite, in every process, as the loss is checked only after the step."""

    @dataclass(kw_only=True, slots=True)
    class Config(OptimizersContainer.Config):
        """The options of torchtitan."""

    found_nonfinite: Tensor | None = None
    """1 if the last step was skipped, else 0; on the device."""

    @staticmethod
    def _build_param_groups(
        model: nn.Module, param_group_configs: list[ParamGroupConfig], impl_kwargs: dict[str, object]
    ) -> ParamGroups:
        """Groups of one pipeline stage; a stage may have no parameter of a group, which torchtitan refuses."""
        names = [name for name, _ in model.named_parameters()]
        found = [config for config in param_group_configs if any(re.search(config.pattern, name) for name in names)]
        groups: ParamGroups = OptimizersContainer._build_param_groups(model, found, impl_kwargs)
        return groups

    def step(self, closure: Any = None) -> None:
        self.found_nonfinite = self._find_nonfinite_gradient()
        if all(group.get("fused") for optimizer in self.optimizers for group in optimizer.param_groups):
            for optimizer in self.optimizers:
                # How torch.amp.GradScaler tells a fused optimizer to skip, without waiting for the device.
                optimizer.found_inf = self.found_nonfinite
        elif self.found_nonfinite.item():
            return
        super().step()

    def _find_nonfinite_gradient(self) -> Tensor:
        gradients = [
            parameter.grad.to_local() if isinstance(parameter.grad, DTensor) else parameter.grad
            for optimizer in self.optimizers
            for group in optimizer.param_groups
            for parameter in group["params"]
            if parameter.grad is not None
        ]
        # One pass that only reads; `isfinite` writes a tensor for each gradient.
        norm = nn.utils.get_total_norm(gradients, foreach=True) if gradients else torch.zeros(())
        found = (~norm.isfinite()).float()
        if dist.get_world_size() > 1:
            # Clipping by a norm that is infinite makes NaN only where the infinity is.
            dist.all_reduce(found, dist.ReduceOp.MAX)
        return found


class StepMetrics(MetricsProcessor):
    """Keeps the numbers of the last step instead of printing them."""

    @dataclass(kw_only=True, slots=True)
    class Config(MetricsProcessor.Config):
        """The options of torchtitan."""

    loss: float = math.nan
    grad_norm: float = math.nan

    def log(
        self,
        step: int,
        global_avg_loss: float,
        global_max_loss: float,
        grad_norm: float,
        extra_metrics: dict[str, object] | None = None,
    ) -> None:
        self.loss, self.grad_norm = global_avg_loss, grad_norm
        self.ntokens_since_last_log = 0
        self.data_loading_times.clear()
