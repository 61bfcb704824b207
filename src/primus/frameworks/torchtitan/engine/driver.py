"""torchtitan's trainer behind the contract of `primus.session.engine`: one optimizer step, evaluation, checkpoints."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint import state_dict_saver
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torchtitan.components.checkpointer.base import DATALOADER
from torchtitan.components.loss import IGNORE_INDEX
from torchtitan.trainer import Trainer as TitanTrainer

from primus.checkpoint.weights import WeightReader
from primus.config.schema import Trainer
from primus.data.training.masks import compute_document_positions, split_inputs_and_targets
from primus.frameworks.torchtitan.engine import settings_in_force
from primus.frameworks.torchtitan.engine.components import CheckedOptimizers, StepMetrics, StepRateSchedule
from primus.frameworks.torchtitan.engine.layout import TitanLayout
from primus.frameworks.torchtitan.engine.random_state import RandomState
from primus.frameworks.torchtitan.engine.trainer_config import build_trainer_config
from primus.frameworks.torchtitan.engine.weights import load_parameters
from primus.frameworks.torchtitan.families import find_family
from primus.session.checkpoints.optimizer_settings import keep_settings
from primus.session.engine import Engine, MicroBatches, StepValues
from primus.session.ranks.torch_processes import read_peak_host_memory
from primus.session.settings.settings_in_force import LiveSetting
from primus.session.settings.torch_settings import StepWatch
from primus.session.timing.compute_timer import ComputeTimer


class TorchTitanEngine(Engine):
    """Trains the model of an experiment with torchtitan's trainer.

    torch.distributed must be initialized, also for a single process: torchtitan's meshes need it.

    Args:
        trainer: An experiment's trainer that the framework accepts.
        layout: How the processes share the model and the batch.
        folder: Where torchtitan puts what it writes by itself.
        device: Of this process.
        eod_id: Token that ends a document; None if documents are not separated.
    """

    def __init__(
        self, trainer: Trainer, layout: TitanLayout, *, folder: Path, device: torch.device, eod_id: int | None = None
    ) -> None:
        self._experiment, self._layout, self._eod_id = trainer, layout, eod_id
        # Normally done where torchtitan initializes torch.distributed: threads of autograd do not know the mesh.
        torch.autograd.set_multithreading_enabled(False)
        config = build_trainer_config(trainer, layout, folder=folder, on_cpu=device.type == "cpu")
        self._titan = TitanTrainer(config)
        # Samples are counted by the session, and an empty entry would be missing when the checkpoint is read.
        self._titan.checkpointer.states.pop(DATALOADER, None)
        self._timer = self._build_timer(device)
        self._watch = StepWatch(self.model)
        data = trainer.data
        self._needs_positions = (
            data.reset_position_ids or data.reset_attention_mask or find_family(trainer.model) == "gpt_oss"
        )
        self._random = RandomState(dist.get_rank(), on_gpu=device.type == "cuda")

    @property
    def data_rank(self) -> int:
        """Rank of this process among those with different sequences."""
        return self._titan.dataloader.data_rank

    @property
    def data_size(self) -> int:
        """Number of processes with different sequences."""
        return self._titan.dataloader.data_size

    @property
    def trainer(self) -> TitanTrainer:
        """torchtitan's trainer."""
        return self._titan

    @property
    def model(self) -> torch.nn.Module:
        """The model, or this process's first part of it in a pipeline."""
        return self._titan.model_parts[0]

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """torchtitan's container of optimizers."""
        return self._titan.optimizers

    def load_weights(self, weights: WeightReader) -> None:
        """Fill the model with weights of hub names."""
        load_parameters(self._titan.model_parts, weights, self._experiment.model)

    def step(self, batches: MicroBatches, learning_rate: float) -> StepValues:
        """One optimizer step over the micro batches of all processes."""
        titan = self._titan
        titan.step += 1
        titan.gc_handler.run(titan.step)
        schedule, metrics = titan.lr_schedulers, titan.metrics_processor
        assert isinstance(metrics, StepMetrics)
        if isinstance(schedule, StepRateSchedule):
            schedule.set_rate(learning_rate, self._experiment.optimizer.lr)
        else:
            # Of the group with weight decay; the trainer prepares the rate of the next step after each step.
            learning_rate = schedule.schedulers[0].get_last_lr()[-1]
        try:
            titan.train_step(self._make_inputs(batches))
        except RuntimeError as error:
            # The trainer judges the loss after the optimizer, which has skipped the step.
            found = re.match(r"Loss is not finite \(global_avg_loss=([^)]*)\)", str(error))
            if found is None:
                raise
            metrics.loss, metrics.grad_norm = float(found[1]), math.nan
        loss, grad_norm = self._share_last_stage((metrics.loss, metrics.grad_norm))
        optimizers = titan.optimizers
        assert isinstance(optimizers, CheckedOptimizers) and optimizers.found_nonfinite is not None
        compute_time = self._timer.take_time() if self._timer else None
        return StepValues(
            loss,
            grad_norm,
            skipped=bool(optimizers.found_nonfinite.item()),
            compute_time_s=compute_time.seconds() if compute_time else None,
            learning_rate=learning_rate,
        )

    def evaluate(self, batches: MicroBatches) -> tuple[float, int]:
        """Sum of the losses of all tokens of all processes, and their number."""
        titan = self._titan
        for part in titan.model_parts:
            part.eval()
        total, count = 0.0, 0
        with torch.no_grad():
            size = self._layout.num_micro_batches if titan.parallel_dims.pp_enabled else 1
            for start in range(0, len(batches), size):
                inputs = list(self._make_inputs(batches[start : start + size]))
                total += self._sum_losses(inputs)
                count += sum(int((labels != IGNORE_INDEX).sum()) for _, labels in inputs)
        for part in titan.model_parts:
            part.train()
        return self._add_over_processes(total, count)

    def save(self, folder: Path) -> None:
        """Write model, optimizer and progress in torchtitan's own format, torch.distributed.checkpoint."""
        manager = self._titan.checkpointer
        state = manager._flattened_model_states_sd() | {"random": self._random}
        state_dict_saver.save(state, checkpoint_id=str(folder))

    def load(self, folder: Path) -> None:
        """Read what `save` wrote, by any number of processes."""
        manager = self._titan.checkpointer
        state = manager._flattened_model_states_sd()
        saved = FileSystemReader(str(folder)).read_metadata().state_dict_metadata
        # A process beyond those that saved keeps its own generators.
        if all(f"random.{name}" in saved for name in self._random.state_dict()):
            state["random"] = self._random
        with keep_settings(lambda: [group for each in self._titan.optimizers for group in each.param_groups]):
            manager.dcp_load(state, checkpoint_id=str(folder), from_hf=False, from_quantized=False)

    def watch_step(self) -> StepWatch:
        return self._watch

    def read_settings(self) -> list[LiveSetting]:
        return settings_in_force.read_settings(self._titan, self._experiment, self._watch)

    def read_memory(self) -> int:
        """Peak memory of this process in bytes: of the device, or on a CPU resident."""
        if self._titan.device.type == "cuda":
            return torch.cuda.max_memory_reserved(self._titan.device)
        return read_peak_host_memory()

    def close(self) -> None:
        """End torchtitan's threads."""
        self._titan.close()
        torch.autograd.set_multithreading_enabled(True)

    def _build_timer(self, device: torch.device) -> ComputeTimer | None:
        """Measures forward and backward passes; None where waits for other processes are inside of layers."""
        titan = self._titan
        if self._layout.data_size != dist.get_world_size():
            return None
        timer, run_passes = ComputeTimer(device, titan.model_parts[0]), titan.fwd_bwd_fn

        def run_measured_passes(*args: Any, **options: Any) -> Tensor:
            with timer.measure_step():
                return run_passes(*args, **options)

        titan.fwd_bwd_fn = run_measured_passes
        return timer

    def _make_inputs(self, batches: MicroBatches) -> Iterator[tuple[dict[str, Tensor], Tensor]]:
        """Micro batches as the trainer reads them: a dictionary of inputs, and targets of which -100 is ignored."""
        data = self._experiment.data
        for tokens in batches:
            inputs, targets = split_inputs_and_targets(tokens, self._eod_id if data.eod_mask_loss else None)
            named = {"input": torch.from_numpy(np.ascontiguousarray(inputs))}
            if self._needs_positions:
                # Where positions begin again, FlexAttention begins another document.
                ends = self._eod_id if data.reset_position_ids or data.reset_attention_mask else None
                named["positions"] = torch.from_numpy(compute_document_positions(inputs, ends))
            yield named, torch.from_numpy(np.ascontiguousarray(targets))

    def _sum_losses(self, inputs: Sequence[tuple[dict[str, Tensor], Tensor]]) -> float:
        """Sum of the losses of this process; 0 before the last stage of a pipeline."""
        titan = self._titan
        seen = titan.ntokens_seen
        prepared = []
        for named, labels in inputs:
            on_device = {name: tensor.to(titan.device) for name, tensor in named.items()}
            prepared.append(titan.post_dataloading_process(on_device, labels.to(titan.device)))
        titan.ntokens_seen = seen  # tokens of an evaluation are not trained on
        with titan.train_context():
            if titan.parallel_dims.pp_enabled:
                return self._sum_pipeline_losses(prepared)
            tokens, labels, options = prepared[0]
            loss, _ = titan.loss_fn(titan.model_parts[0](tokens, **options), labels)
            return float(loss.item())

    def _sum_pipeline_losses(self, prepared: Sequence[tuple[Tensor, Tensor, dict[str, object]]]) -> float:
        titan = self._titan
        losses: list[Tensor] | None = [] if titan.pp_has_last_stage else None
        titan.pp_schedule.eval(
            arg_mbs=[(tokens,) for tokens, _, _ in prepared] if titan.pp_has_first_stage else None,
            kwarg_mbs=[options for _, _, options in prepared],
            target_mbs=[labels for _, labels, _ in prepared] if titan.pp_has_last_stage else None,
            losses=losses,
            return_outputs=False,
        )
        return float(torch.stack(losses).sum().item()) if losses else 0.0

    def _add_over_processes(self, total: float, count: int) -> tuple[float, int]:
        """Totals over the processes that have different tokens; the last stage's loss is shared."""
        dims = self._titan.parallel_dims
        values = torch.tensor([total, count], dtype=torch.float64, device=self._titan.device)
        if dims.dp_cp_enabled:
            dist.all_reduce(values, group=dims.get_mesh("loss").get_group())
        if dims.cp_enabled:
            # Every process of a group has counted the whole sequence.
            values[1] /= dims.cp
        loss, _ = self._share_last_stage((float(values[0]), 0.0))
        return loss, int(values[1])

    def _share_last_stage(self, values: tuple[float, float]) -> tuple[float, float]:
        """The values of the last pipeline stage, in every stage."""
        titan = self._titan
        if not titan.parallel_dims.pp_enabled:
            return values
        # Only the last stage has a loss; the others contribute nothing to the sum.
        tensor = torch.tensor(values, dtype=torch.float64, device=titan.device) * float(titan.pp_has_last_stage)
        dist.all_reduce(tensor, group=titan.parallel_dims.get_mesh("pp").get_group())
        return float(tensor[0]), float(tensor[1])
