"""megatron-core as an engine of the session: one optimizer step at a time over its own schedules and optimizer."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.transformer_config import TransformerConfig
from numpy.typing import NDArray
from torch import Tensor, nn

from primus.config.schema import Trainer
from primus.frameworks.megatron.engine import checkpoint, settings_in_force
from primus.frameworks.megatron.engine.batches import BatchOptions, ModelBatch, iterate_batches
from primus.frameworks.megatron.engine.config import (
    build_ddp_config,
    build_optimizer_config,
    build_transformer_config,
    collect_values,
)
from primus.frameworks.megatron.engine.model import build_gpt_model
from primus.frameworks.megatron.engine.schedule import build_scheduler
from primus.frameworks.megatron.engine.weights import copy_weights
from primus.session.engine import Engine, StepValues
from primus.session.ranks.torch_processes import read_peak_memory
from primus.session.settings.settings_in_force import LiveSetting
from primus.session.settings.torch_settings import StepWatch

if TYPE_CHECKING:
    from primus.checkpoint.weights import WeightReader

ExtraFields = Mapping[str, Mapping[str, Any]]
"""Fields that the user sets in `backend_args`, by name, for ``transformer``, ``ddp`` and ``optimizer``."""


class SkippedStepError(Exception):
    """The gradient or the loss is not finite: raised inside the optimizer before it changes anything."""

    def __init__(self, grad_norm: float) -> None:
        super().__init__()
        self.grad_norm = grad_norm


class EngineParts(NamedTuple):
    """What trains: this process's part of the model, and its optimizer."""

    model: DistributedDataParallel
    optimizer: Any
    """Of `get_megatron_optimizer`."""
    config: TransformerConfig
    scheduler: OptimizerParamScheduler | None
    """Megatron's own schedule; None if the caller gives the rate of each step."""


def build_core_parts(
    trainer: Trainer,
    device: torch.device,
    global_batch_size: int,
    *,
    use_transformer_engine: bool = False,
    extra: ExtraFields | None = None,
) -> EngineParts:
    """The model and optimizer of an experiment, built by megatron-core; also makes its process groups.

    Args:
        trainer: The experiment's module.
        device: Of this process.
        global_batch_size: Sequences in one optimizer step.
        use_transformer_engine: Build Transformer Engine's layers instead of those of megatron-core.
        extra: Fields of the user.
    """
    extra = extra or {}
    parallel_state.initialize_model_parallel(**collect_values(trainer, "groups"))
    tensor_parallel.model_parallel_cuda_manual_seed(trainer.training.seed)
    config = build_transformer_config(trainer, device.type, use_transformer_engine, extra.get("transformer", {}))
    gpt: nn.Module = build_gpt_model(trainer, config, use_transformer_engine)
    if device.type == "cuda":
        gpt.cuda(device)
    model, optimizer = wrap_model(trainer, gpt, config, extra)
    follows_own = trainer.optimizer.schedule == "engine"
    scheduler = build_scheduler(trainer, optimizer, global_batch_size) if follows_own else None
    return EngineParts(model, optimizer, config, scheduler)


def wrap_model(
    trainer: Trainer, gpt: nn.Module, config: TransformerConfig, extra: ExtraFields
) -> tuple[DistributedDataParallel, Any]:
    """A model on its device for data-parallel training, and the optimizer of its weights that are trained."""
    inner = Float16Module(config, gpt) if trainer.training.bf16 else gpt
    model = DistributedDataParallel(config, build_ddp_config(trainer, extra.get("ddp", {})), inner)
    return model, get_megatron_optimizer(build_optimizer_config(trainer, extra.get("optimizer", {})), [model])


class MegatronEngine(Engine):
    """One optimizer step at a time over the schedules of megatron-core.

    torch.distributed must be initialized; every process of the run makes the same calls in the same order.

    Args:
        trainer: The experiment's module.
        device: Of this process.
        global_batch_size: Sequences in one optimizer step.
        options: How documents are treated.
        parts: What trains.
    """

    def __init__(
        self, trainer: Trainer, device: torch.device, global_batch_size: int, options: BatchOptions, parts: EngineParts
    ) -> None:
        self.trainer, self.device = trainer, device
        self._global_batch_size, self._options = global_batch_size, options
        self._model, self._optimizer, self.config, self._scheduler = parts
        self._set_overlap()
        self._allows_update = True
        self._watch_grad_norm()
        self._forward_backward = get_forward_backward_func()
        self._watch = StepWatch(self._model)
        self.num_steps = 0
        """Optimizer steps, those of the checkpoint included."""

    @property
    def data_rank(self) -> int:
        """Data-parallel rank of this process: which micro batches it gets."""
        return parallel_state.get_data_parallel_rank()

    @property
    def data_size(self) -> int:
        """Number of data-parallel ranks."""
        return parallel_state.get_data_parallel_world_size()

    @property
    def model(self) -> nn.Module:
        return self._model

    @property
    def gpt_model(self) -> nn.Module:
        """The model without its wrappers."""
        inner = self._model.module
        return inner.module if isinstance(inner, Float16Module) else inner

    @property
    def optimizer(self) -> Any:
        return self._optimizer

    def load_weights(self, weights: WeightReader) -> None:
        """Copy weights in hub names into the model and the optimizer's masters."""
        copy_weights(self.gpt_model, self.trainer.model, weights)
        self._optimizer.reload_model_params()

    def step(self, batches: Sequence[NDArray[np.int64]], learning_rate: float) -> StepValues:
        """Take one optimizer step; a step that is not finite changes nothing."""
        learning_rate = self._set_learning_rate(learning_rate)
        self._model.zero_grad_buffer()
        self._optimizer.zero_grad()
        started = time.perf_counter()
        loss_sum, num_tokens = self._run(batches, forward_only=False)
        # Other processes' work is in it only with several pipeline stages, which wait for each other.
        seconds = time.perf_counter() - started
        loss = loss_sum / max(num_tokens, 1)
        self._allows_update = math.isfinite(loss)
        try:
            _, grad_norm, _ = self._optimizer.step()
        except SkippedStepError as skipped:
            return StepValues(
                loss, skipped.grad_norm, skipped=True, compute_time_s=seconds, learning_rate=learning_rate
            )
        self.num_steps += 1
        if self._scheduler is not None:  # counts only steps that were taken, as in Megatron-LM
            self._scheduler.step(self._global_batch_size)
        return StepValues(loss, float(grad_norm), compute_time_s=seconds, learning_rate=learning_rate)

    def evaluate(self, batches: Sequence[NDArray[np.int64]]) -> tuple[float, int]:
        """Sum of the losses, and number, of the tokens that count in the batches of all processes."""
        self._model.eval()
        try:
            with torch.no_grad():
                return self._run(batches, forward_only=True)
        finally:
            self._model.train()

    def save(self, folder: Path) -> None:
        """Write weights, optimizer and random states in the format ``torch_dist`` of megatron-core."""
        scheduled = self._scheduler.num_steps if self._scheduler else None
        checkpoint.save_checkpoint(folder, self.gpt_model, self._optimizer, self.num_steps, scheduled)

    def load(self, folder: Path) -> None:
        """Restore what `save` wrote, also with another layout of processes."""
        self.num_steps, scheduled = checkpoint.load_checkpoint(folder, self.gpt_model, self._optimizer)
        if self._scheduler is not None:
            # A checkpoint of a run with the schedule of primus has no count.
            self._scheduler.num_steps = self.num_steps * self._global_batch_size if scheduled is None else scheduled
            self._scheduler.step(0)

    def watch_step(self) -> StepWatch:
        return self._watch

    def read_settings(self) -> list[LiveSetting]:
        return settings_in_force.read_settings(self._model, self._optimizer, self.config, self.trainer, self._watch)

    def read_memory(self) -> int:
        return read_peak_memory(self.device)

    def close(self) -> None:
        """Forget the process groups of megatron-core; those who initialized torch.distributed destroy it."""
        parallel_state.destroy_model_parallel()

    def _set_overlap(self) -> None:
        """What Megatron-LM sets before its loop for communication that overlaps with computing."""
        if self._model.ddp_config.overlap_grad_reduce:
            self.config.no_sync_func = self._model.no_sync
        if self._model.ddp_config.overlap_param_gather:
            self.config.param_sync_func = self._model.start_param_sync

    def _watch_grad_norm(self) -> None:
        """Leave the optimizer's step before it changes anything if the loss or the gradient is not finite.

        The optimizer computes the norm in its step, before it clips. Computing it twice would cost a pass over the
        gradients.
        """
        compute: Callable[[], Any] = self._optimizer.get_grad_norm

        def compute_finite_norm() -> Any:
            norm = compute()
            if not (self._allows_update and math.isfinite(float(norm))):
                raise SkippedStepError(float(norm))
            return norm

        self._optimizer.get_grad_norm = compute_finite_norm

    def _set_learning_rate(self, learning_rate: float) -> float:
        """Set the learning rate of the next step, which is returned; Megatron's scheduler has set its own already."""
        if self._scheduler is not None:
            return float(self._scheduler.get_lr({}))
        # What OptimizerParamScheduler does, too: without it norms and biases would decay.
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate * group.get("lr_mult", 1.0)
            group["weight_decay"] = self.trainer.optimizer.weight_decay * group.get("wd_mult", 1.0)
        return learning_rate

    def _run(self, batches: Sequence[NDArray[np.int64]], forward_only: bool) -> tuple[float, int]:
        """Pass micro batches through the pipeline; gives the loss sum and the number of tokens of all processes."""
        training = self.trainer.training
        results = self._forward_backward(
            forward_step_func=self._forward,
            data_iterator=iterate_batches(batches, self._options, self.device),
            model=[self._model],
            num_microbatches=len(batches),
            seq_length=training.seq_length,
            micro_batch_size=training.micro_batch_size,
            forward_only=forward_only,
        )
        # float64: a float32 sum of losses differs from the exact one by up to two units in its last place.
        sums = torch.zeros(2, dtype=torch.float64, device=self.device)
        for result in results:
            sums += result["sums"]
        # Only the last pipeline stage has losses; tensor-parallel ranks have the same.
        dist.all_reduce(sums, group=parallel_state.get_data_parallel_group(with_context_parallel=True))
        if parallel_state.get_pipeline_model_parallel_world_size() > 1:
            last = parallel_state.get_pipeline_model_parallel_last_rank()
            dist.broadcast(sums, last, group=parallel_state.get_pipeline_model_parallel_group())
        loss_sum, num_tokens = sums.tolist()
        return loss_sum, int(num_tokens)

    def _forward(self, iterator: Any, model: nn.Module) -> tuple[Tensor, Callable[[Tensor], Any]]:
        """The forward step that megatron-core's schedules call: losses of the last stage, and how to sum them."""
        batch: ModelBatch = next(iterator)
        packed = {} if batch.packed is None else {"packed_seq_params": batch.packed}
        output = model(batch.tokens, batch.position_ids, batch.attention_mask, labels=batch.targets, **packed)

        def sum_losses(losses: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
            counted = losses.float() * batch.loss_mask
            num_tokens = batch.loss_mask.sum()
            sums = torch.stack([counted.detach().sum(dtype=torch.float64), num_tokens.double()])
            return counted.sum(), num_tokens.int(), {"sums": sums}

        return output, sum_losses
