"""One optimizer step, in one process or sharded over several, in fp32 or bf16, eager or compiled."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from primus.frameworks.native.engine.gradient_norm import compute_gradient_norm
from primus.frameworks.native.engine.loss import count_targets
from primus.frameworks.native.engine.loss_scale import LossScale
from primus.frameworks.native.engine.memory import keep_freed_memory
from primus.frameworks.native.engine.model import Transformer
from primus.frameworks.native.engine.moe import Router, end_routing, list_routers
from primus.frameworks.native.engine.pipeline import Batch, Pipeline
from primus.frameworks.native.engine.placement import PlacedWeight
from primus.frameworks.native.engine.spikes import LossWindow

NONFINITE, SPIKE, OVERFLOW = 1.0, 2.0, 3.0
"""Why a step was skipped."""


class PassTimer(Protocol):
    """Measures passes."""

    def measure_step(self) -> AbstractContextManager[None]:
        """Those of one micro batch, or of all in a pipeline."""
        ...


@dataclass(frozen=True)
class Trainable:
    """A model ready for `train_step`."""

    model: Transformer
    """The model; its parameters are float32 (the masters), sharded if there are several processes."""
    loss: Callable[..., Tensor]
    """(tokens, targets, scale, examples if packed) -> scale x summed loss; compiled if requested."""
    device: torch.device
    """Device of this process."""
    pipeline: Pipeline | None = None
    """Runs the passes, if the layers are those of a pipeline stage."""
    window: LossWindow | None = None
    """Finds the steps whose loss is a spike; None if spikes are steps like others."""
    timer: PassTimer | None = None
    """Measures the passes."""
    routers: Sequence[Router] = ()
    """Of the model."""
    loss_scale: LossScale | None = None
    """Factor of the loss in the passes, for gradients in float16."""
    count: Callable[[Batch], Tensor] = lambda batch: count_targets(batch[1])
    """How many tokens, or pairs of answers, of a micro batch the mean loss is over."""


@dataclass(frozen=True)
class StepResult:
    """Outcome of a step, still on the device: reading a property waits for the step to finish."""

    values: Tensor
    """[loss, grad norm, NONFINITE, SPIKE or OVERFLOW if skipped else 0, tokens], float64."""
    routing: Tensor | None = None
    """See `moe.end_routing`; None without experts."""
    prediction_loss: Tensor | None = None
    """Mean loss of the layers of multi-token prediction; None without them."""

    @property
    def loss(self) -> float:
        """Mean loss over the tokens of all micro batches and processes."""
        return self.values[0].item()

    @property
    def grad_norm(self) -> float:
        """Norm of the whole gradient before clipping."""
        return self.values[1].item()

    @property
    def is_skipped(self) -> bool:
        """The loss or the gradient was not finite or a spike: parameters and optimizer state are as before."""
        return self.values[2].item() != 0.0

    @property
    def num_tokens(self) -> int:
        """Tokens with a target in all micro batches of all processes."""
        return int(self.values[3].item())


def prepare_model(model: Transformer, *, device: torch.device | str, compile: bool = False) -> Trainable:
    """Make `model` trainable; a model on the meta device is allocated, and needs `model.initialize_weights` afterwards.

    Args:
        model: From `model.build_model`, with the attributes that say how it computes; changed in place. Its weights,
            gradients and optimizer state are sharded over `shard_mesh` of its layout.
        device: Where it trains.
        compile: torch.compile of the model with its loss (of each layer if there are several processes).
    """
    device = torch.device(device)
    if device.type == "cpu":
        keep_freed_memory()
    shard_model(model, compile=compile)
    return allocate_model(model, device=device, compile=compile)


def shard_model(model: Transformer, *, compile: bool) -> None:
    """The first part of `prepare_model`, which allocates nothing for a model on the meta device."""
    layout = model.layout
    is_alone = layout.losses is None
    # Each layer is compiled for itself: a graph of the whole model would contain the exchanges between processes.
    if compile and not is_alone:
        for layer in model.transformer_layers:
            # Before fully_shard, whose hooks then run outside of the compiled graph.
            layer.compile()
        model.loss_settings = model.loss_settings._replace(is_fused=True)
    meshes = [layout.shard_mesh, layout.expert_mesh if model.spec.num_experts else None]
    if layout.shard_mesh is not None and any(mesh is not None and mesh.size() > 1 for mesh in meshes):
        _shard_model(model, layout.shard_mesh)


def allocate_model(model: Transformer, *, device: torch.device, compile: bool) -> Trainable:
    """The second part of `prepare_model`."""
    if any(parameter.is_meta for parameter in model.parameters()):
        model.to_empty(device=device)
    else:
        model.to(device)
    loss = torch.compile(model) if compile and model.layout.losses is None else model
    pipeline = Pipeline(model, device) if model.layout.pipeline.size > 1 else None
    return Trainable(model, loss, device, pipeline, routers=list_routers(model))


def train_step(
    trainable: Trainable,
    optimizer: torch.optim.Optimizer,
    micro_batches: Sequence[Batch],
    *,
    learning_rate: float,
    clip_grad: float,
) -> StepResult:
    """One optimizer step over all micro batches of all processes.

    The gradient is that of the mean loss over every token that has a target, in any micro batch and process. A step
    whose loss or gradient is not finite, or whose loss is a spike, changes nothing. The host never waits
    for the device.
    """
    layout = trainable.model.layout
    # Stays on the device: the number of tokens is needed on the host only in the report.
    counts = torch.stack([trainable.count(batch) for batch in micro_batches])
    num_tokens = _sum_over(layout.data.group, counts.sum())
    # The divisor is known before the first pass, so gradients add up to those of the mean without a pass over them.
    # float64: a float32 sum of losses differs from the exact one by up to two units in its last place.
    loss_scale = trainable.loss_scale
    scaled_by = torch.ones((), dtype=torch.float64, device=trainable.device) if loss_scale is None else loss_scale.value
    scale = scaled_by / num_tokens.clamp_min(1).double()
    if trainable.pipeline is None:
        loss = _run_passes(trainable, micro_batches, scale)
    else:
        with trainable.timer.measure_step() if trainable.timer else nullcontext():
            loss = trainable.pipeline.run_passes(micro_batches, scale)
    gradients = _finish_gradients(trainable.model)
    # Reduced before it is judged: every process then has the same bits, and decides the same.
    loss = _sum_over(layout.losses, loss) / scaled_by
    grad_norm = compute_gradient_norm(gradients, layout.pipeline) / scaled_by
    # A tensor rather than a branch: a branch on its value would wait for the device.
    skipped = NONFINITE * ~(loss.isfinite() & grad_norm.isfinite())
    if trainable.window is not None:
        skipped = torch.where(skipped == 0, SPIKE * trainable.window.add_loss(loss.float()), skipped)
    divisor = _compute_divisor(grad_norm, clip_grad) * scaled_by.float()
    if loss_scale is not None:
        overflows = loss.isfinite() & ~grad_norm.isfinite() & loss_scale.can_fall()
        skipped = torch.where(overflows, OVERFLOW, skipped)
        loss_scale.update(overflows, skipped != 0)
    _apply_update(optimizer, learning_rate, divisor, skipped != 0)
    routing = end_routing(trainable.routers, skipped != 0, layout.stage)
    further = trainable.model.take_prediction_loss()
    if further is not None:
        further = _sum_over(layout.losses, further) / scaled_by
    values = torch.stack([value.double() for value in (loss, grad_norm, skipped, num_tokens)])
    return StepResult(values, routing, further)


def _run_passes(trainable: Trainable, micro_batches: Sequence[Batch], scale: Tensor) -> Tensor:
    """The passes of all micro batches, one after the other; returns the sum of this process's losses."""
    loss = torch.zeros((), dtype=torch.float64, device=trainable.device)
    for index, (tokens, targets, *examples) in enumerate(micro_batches):
        _synchronise_gradients(trainable.model, index == len(micro_batches) - 1)
        with trainable.timer.measure_step() if trainable.timer else nullcontext():
            part = trainable.loss(tokens, targets, scale, *examples)
            # With FSDP the reduction of the gradients overlaps with this pass in the last micro batch.
            part.backward()
        # Detached, because the sum would otherwise keep the graphs of all micro batches in memory.
        loss = loss + part.detach()
    return loss


@torch.no_grad()
def evaluate_batches(trainable: Trainable, batches: Sequence[Batch]) -> tuple[float, int]:
    """Sum of the losses, and number, of the tokens of all batches of all processes; every process must call it."""
    layout = trainable.model.layout
    one = torch.ones((), dtype=torch.float64, device=trainable.device)
    loss = torch.zeros((), dtype=torch.float64, device=trainable.device)
    num_tokens = torch.zeros((), dtype=torch.int64, device=trainable.device)
    for tokens, targets, *examples in batches:
        num_tokens += trainable.count((tokens, targets, *examples))
        if trainable.pipeline is None:
            loss += trainable.loss(tokens, targets, one, *examples)
    if trainable.pipeline is not None:
        loss = trainable.pipeline.evaluate(batches, one)
    return _sum_over(layout.losses, loss).item(), int(_sum_over(layout.data.group, num_tokens).item())


def _shard_model(model: Transformer, mesh: DeviceMesh) -> None:
    """Shard by FSDP2: each layer is gathered when it runs (torch.distributed.fsdp.fully_shard).

    A mesh of replicas is the same code path: gradients are reduced by FSDP2 as well.
    """
    policy = MixedPrecisionPolicy(
        param_dtype=model.compute_dtype,
        reduce_dtype=next(model.parameters()).dtype,
        cast_forward_inputs=False,  # rotary angles stay float32, the loss scale float64
    )
    for layer in model.transformer_layers:
        experts = getattr(layer.feed_forward, "experts", None)
        expert_mesh = model.layout.expert_mesh
        if experts is not None and expert_mesh is not None:
            fully_shard(experts, mesh=expert_mesh, mp_policy=policy)
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)  # the loss is divided by the tokens of all processes already
            module.set_force_sum_reduction_for_comms(True)  # gloo supports no other reduction


def _synchronise_gradients(model: Transformer, now: bool) -> None:
    """Reduce gradients over the processes after the last micro batch only."""
    if isinstance(model, FSDPModule):
        # Without it each micro batch would reduce its gradients: the same result with more communication.
        model.set_requires_gradient_sync(now)


def _sum_over(group: dist.ProcessGroup | None, value: Tensor) -> Tensor:
    if group is not None:
        # In place and asynchronous on GPUs: the host does not wait for the sum.
        dist.all_reduce(value, group=group)
    return value


def _finish_gradients(model: Transformer) -> list[PlacedWeight]:
    """The gradients after all passes, each of which counts once; they lack what other processes add after FSDP2."""
    layout, gradients = model.layout, {}
    for name, weight in model.place_weights().items():
        if weight.tensor.grad is not None:
            gradients[name] = weight.place(weight.tensor.grad)
    # Of norms, each process of `layout.tensor` has the gradients of its tokens or heads.
    partial = [gradient.local for gradient in gradients.values() if gradient.division.is_partial]
    if partial:
        # One exchange for all: each is small.
        total = _sum_over(layout.tensor.group, torch.cat([each.flatten() for each in partial]))
        sums = total.split([each.numel() for each in partial])
        torch._foreach_copy_(partial, [part.view_as(each) for part, each in zip(sums, partial, strict=True)])
    if model.has_tied_copy:
        _sum_over(layout.ends, gradients["embedding.weight"].local)
    return [gradient for name, gradient in gradients.items() if not model.is_copy(name)]


def _compute_divisor(grad_norm: Tensor, clip_grad: float) -> Tensor:
    """Divisor of the gradients that limits their norm to `clip_grad`."""
    if clip_grad == 0.0:
        return torch.ones_like(grad_norm, dtype=torch.float32)
    return (grad_norm / clip_grad).clamp_min(1.0).float()  # fused optimizers read a float32


def _apply_update(optimizer: torch.optim.Optimizer, learning_rate: float, divisor: Tensor, skipped: Tensor) -> None:
    """Step with gradients divided by `divisor`, unless `skipped`.

    The two attributes are how torch.amp.GradScaler talks to fused optimizers: scaling and skipping happen
    inside the kernel, so gradients are read once and the host does not wait for `skipped`.
    """
    for group in optimizer.param_groups:
        group["lr"] = learning_rate
    optimizer.grad_scale = divisor  # type: ignore[attr-defined]
    optimizer.found_inf = skipped.float()  # type: ignore[attr-defined]
    optimizer.step()
    # None rather than zeros: the next backward pass then writes gradients instead of adding to them.
    optimizer.zero_grad(set_to_none=True)
