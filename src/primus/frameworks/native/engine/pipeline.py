"""The passes of a model whose layers are spread over pipeline stages, in the order of torch.distributed.pipelining."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

from primus.frameworks.native.engine.layout import Axis

if TYPE_CHECKING:
    from primus.frameworks.native.engine.model import Transformer

Batch = tuple[Tensor, ...]
"""Tokens and targets of one micro batch, both int64 [B, S] on the model's device; of packed examples also the number of
each token's example."""


def choose_layers(num_layers: int, stages: Axis) -> range:
    """The layers of this process's stage."""
    size = num_layers // stages.size
    return range(stages.rank * size, (stages.rank + 1) * size)


class Pipeline:
    """Runs micro batches through the stages; each process of `layout.pipeline` has one and must make the same calls.

    Args:
        model: The layers of this stage.
        device: Of this process.
    """

    def __init__(self, model: Transformer, device: torch.device) -> None:
        stages = model.layout.pipeline
        self._stage = PipelineStage(model, stages.rank, stages.size, device, group=stages.group)
        self._schedules: dict[int, Schedule1F1B | ScheduleGPipe] = {}

    def run_passes(self, micro_batches: Sequence[Batch], scale: Tensor) -> Tensor:
        """The forward and backward passes; returns `scale` x the sum of the losses, 0 but in the last stage."""
        return self._run(micro_batches, scale, has_backward=True)

    def evaluate(self, micro_batches: Sequence[Batch], scale: Tensor) -> Tensor:
        """The same without backward passes."""
        return self._run(micro_batches, scale, has_backward=False)

    def _run(self, micro_batches: Sequence[Batch], scale: Tensor, has_backward: bool) -> Tensor:
        count = len(micro_batches)
        tokens, targets, *examples = _join_batches(micro_batches)
        # The schedule splits every argument into micro batches, along its first dimension.
        kwargs: dict[str, Any] = {"targets_BS": targets, "scale": scale.expand(count), "tokens_BS": tokens}
        if examples:
            kwargs["examples_BS"] = examples[0]
        args = (tokens,) if self._stage.is_first else ()
        losses: list[Tensor] = []
        schedule = self._find_schedule(count)
        run = schedule.step if has_backward else schedule.eval
        run(*args, target=targets, losses=losses, return_outputs=False, **kwargs)
        if not self._stage.is_last:
            return torch.zeros((), dtype=scale.dtype, device=scale.device)
        return torch.stack(losses).detach().sum()

    def _find_schedule(self, count: int) -> Schedule1F1B | ScheduleGPipe:
        """1F1B keeps the activations of as many micro batches as there are stages; it needs at least as many."""
        if count not in self._schedules:
            kind = Schedule1F1B if count >= self._stage.num_stages else ScheduleGPipe
            self._schedules[count] = kind(self._stage, count, _take_loss, scale_grads=False)
        return self._schedules[count]


def _take_loss(loss: Tensor, targets: Tensor) -> Tensor:
    """The last stage returns the loss itself, see `Transformer.forward`."""
    return loss


def _join_batches(micro_batches: Sequence[Batch]) -> list[Tensor]:
    """Tokens, targets and, if one has them, examples of all micro batches, one after the other."""
    width = max(len(batch) for batch in micro_batches)
    # A micro batch without numbers of examples is one example.
    full = [batch if len(batch) == width else (*batch, torch.zeros_like(batch[0])) for batch in micro_batches]
    return [torch.cat(parts) for parts in zip(*full, strict=True)]
