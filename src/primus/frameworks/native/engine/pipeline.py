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
        self._model, self._device = model, device
        self._schedules: dict[tuple[int, torch.Size], Schedule1F1B | ScheduleGPipe] = {}

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
        args = (tokens,) if self._model.stage.is_first else ()
        losses: list[Tensor] = []
        schedule = self._find_schedule(count, micro_batches[0][0])
        run = schedule.step if has_backward else schedule.eval
        run(*args, target=targets, losses=losses, return_outputs=False, **kwargs)
        if not self._model.stage.is_last:
            return torch.zeros((), dtype=scale.dtype, device=scale.device)
        return torch.stack(losses).detach().sum()

    def _find_schedule(self, count: int, tokens_BS: Tensor) -> Schedule1F1B | ScheduleGPipe:
        """1F1B keeps the activations of as many micro batches as there are stages; it needs at least as many."""
        key = count, tokens_BS.shape
        if key not in self._schedules:
            stages = self._model.layout.pipeline
            kind = Schedule1F1B if count >= stages.size else ScheduleGPipe
            self._schedules[key] = kind(self._build_stage(tokens_BS), count, _take_loss, scale_grads=False)
        return self._schedules[key]

    def _build_stage(self, tokens_BS: Tensor) -> PipelineStage:
        """The stage with the shapes of what it receives and sends. Otherwise the schedule would find them by passes of
        the model, whose routers would count the tokens of one more micro batch."""
        model, layout = self._model, self._model.layout
        batch, length = tokens_BS.shape
        length //= layout.context.size * (layout.tensor.size if layout.sequence_parallel else 1)
        dtype = model.compute_dtype or next(model.parameters()).dtype
        hidden_BSD = torch.empty(batch, length, model.spec.hidden_size, dtype=dtype, device="meta", requires_grad=True)
        loss = torch.empty((), dtype=torch.float64, device="meta", requires_grad=True)
        return PipelineStage(
            model,
            layout.pipeline.rank,
            layout.pipeline.size,
            self._device,
            input_args=tokens_BS.to("meta") if model.stage.is_first else hidden_BSD,
            output_args=loss if model.stage.is_last else hidden_BSD,
            group=layout.pipeline.group,
        )


def _take_loss(loss: Tensor, targets: Tensor) -> Tensor:
    """The last stage returns the loss itself, see `Transformer.forward`."""
    return loss


def _join_batches(micro_batches: Sequence[Batch]) -> list[Tensor]:
    """Tokens, targets and, if one has them, examples of all micro batches, one after the other."""
    width = max(len(batch) for batch in micro_batches)
    # A micro batch without numbers of examples is one example.
    full = [batch if len(batch) == width else (*batch, torch.zeros_like(batch[0])) for batch in micro_batches]
    return [torch.cat(parts) for parts in zip(*full, strict=True)]
