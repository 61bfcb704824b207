"""The passes of a model whose layers are spread over pipeline stages, in the order of torch.distributed.pipelining."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleLoopedBFS,
)

from primus.frameworks.native.engine.layout import Axis
from primus.frameworks.native.engine.model import StageLayers, Transformer

Batch = tuple[Tensor, ...]
"""Tokens and targets of one micro batch, both int64 [B, S] on the model's device; of packed examples also the number of
each token's example."""
Schedule = Schedule1F1B | ScheduleGPipe | ScheduleInterleaved1F1B | ScheduleLoopedBFS


def choose_layers(num_layers: int, stages: Axis, num_groups: int = 1) -> StageLayers:
    """The layers of this process's stage: each stage has as many, in every group."""
    size = num_layers // (stages.size * num_groups)
    begins = [(group * stages.size + stages.rank) * size for group in range(num_groups)]
    groups = tuple(range(begin, begin + size) for begin in begins)
    return StageLayers(groups, is_first=stages.rank == 0, is_last=stages.rank == stages.size - 1)


class _LayerGroup(nn.Module):
    """One of several groups of layers of a stage.

    The model is not a submodule: its gradients are reduced once, and not by the schedule for each group.
    """

    def __init__(self, model: Transformer, group: int) -> None:
        super().__init__()
        self._models, self._group = (model,), group

    def forward(self, x: Tensor, **kwargs: Any) -> Tensor:
        return self._models[0](x, group=self._group, **kwargs)


class Pipeline:
    """Runs micro batches through the stages; each process of `layout.pipeline` has one and must make the same calls.

    Args:
        model: The layers of this stage.
        device: Of this process.
    """

    def __init__(self, model: Transformer, device: torch.device) -> None:
        self._model, self._device = model, device
        self._schedules: dict[tuple[int, torch.Size], Schedule] = {}

    def run_passes(self, micro_batches: Sequence[Batch], scale: Tensor) -> Tensor:
        """The forward and backward passes; returns `scale` x the sum of the losses, 0 but in the last stage."""
        model = self._model
        reduces_once = len(model.stage.groups) > 1
        if isinstance(model, FSDPModule) and reduces_once:
            model.set_is_last_backward(False)
            model.set_reshard_after_backward(False)
            model.set_requires_gradient_sync(False)
        loss = self._run(micro_batches, scale, has_backward=True)
        if isinstance(model, FSDPModule) and reduces_once:
            self._build_stage(micro_batches[0][0], 0, model).perform_reduce_grad(1)
        return loss

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

    def _find_schedule(self, count: int, tokens_BS: Tensor) -> Schedule:
        """1F1B keeps the activations of as many micro batches as there are stages; it needs at least as many.

        With several groups it goes in rounds of equal size. Other numbers of micro batches pass all forward first.
        """
        key = count, tokens_BS.shape
        if key not in self._schedules:
            size, num_groups = self._model.layout.pipeline.size, len(self._model.stage.groups)
            options: dict[str, Any] = {"n_microbatches": count, "loss_fn": _take_loss, "scale_grads": False}
            if num_groups == 1:
                kind = Schedule1F1B if count >= size else ScheduleGPipe
                self._schedules[key] = kind(self._build_stage(tokens_BS, 0, self._model), **options)
            else:
                stages: list[Any] = [
                    self._build_stage(tokens_BS, n, _LayerGroup(self._model, n)) for n in range(num_groups)
                ]
                has_rounds = count % max(1, count // size) == 0
                self._schedules[key] = (ScheduleInterleaved1F1B if has_rounds else ScheduleLoopedBFS)(stages, **options)
        return self._schedules[key]

    def _build_stage(self, tokens_BS: Tensor, group: int, module: nn.Module) -> PipelineStage:
        """The stage of a group with the shapes of what it receives and sends. Otherwise the schedule would find them by
        passes of the model, whose routers would count the tokens of one more micro batch."""
        model, layout = self._model, self._model.layout
        batch, length = tokens_BS.shape
        length //= layout.context.size * (layout.tensor.size if layout.sequence_parallel else 1)
        dtype = model.compute_dtype or next(model.parameters()).dtype
        hidden_BSD = torch.empty(batch, length, model.spec.hidden_size, dtype=dtype, device="meta", requires_grad=True)
        loss = torch.empty((), dtype=torch.float64, device="meta", requires_grad=True)
        count = layout.pipeline.size * len(model.stage.groups)
        index = group * layout.pipeline.size + layout.pipeline.rank
        return PipelineStage(
            module,
            index,
            count,
            self._device,
            input_args=tokens_BS.to("meta") if index == 0 else hidden_BSD,
            output_args=loss if index == count - 1 else hidden_BSD,
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
