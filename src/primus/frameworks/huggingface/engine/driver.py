"""An engine that trains a causal language model of Transformers with torch's AdamW, sharded by FSDP2 over processes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from primus.checkpoint.weights import WeightReader
from primus.config.exports.hugging_face import format_model_config
from primus.config.schema import ModelSpec, Trainer
from primus.data.training.masks import split_inputs_and_targets
from primus.errors import PrimusError
from primus.frameworks.huggingface.engine import settings_in_force
from primus.frameworks.huggingface.packed_experts import list_module_names, read_module_tensor
from primus.frameworks.huggingface.support import KEYS
from primus.session.engine import Engine, StepValues
from primus.session.ranks.torch_processes import TorchProcesses, read_peak_memory
from primus.session.settings.settings_in_force import LiveSetting
from primus.session.settings.torch_settings import StepWatch


class TransformersEngine(Engine):
    """Trains a model of Transformers.

    Args:
        trainer: What to train.
        processes: Those that share the batch and, by default, the weights.
        masked_token: Token after which nothing is predicted; None if everything is.
    """

    def __init__(self, trainer: Trainer, processes: TorchProcesses, masked_token: int | None = None) -> None:
        self._trainer, self._processes, self._masked_token = trainer, processes, masked_token
        self._device = processes.device
        is_cast = trainer.training.bf16 and processes.world == 1
        self._model: Any = build_model(trainer.model, is_cast).to(self._device)
        self._model.train()
        if trainer.training.recompute_activations:
            self._model.gradient_checkpointing_enable()
        if processes.world > 1:
            self._shard_model()
        self._optimizer = self._build_optimizer()
        self._watch = StepWatch(self._model)

    @property
    def data_rank(self) -> int:
        return self._processes.rank

    @property
    def model(self) -> Any:
        return self._model

    @property
    def optimizer(self) -> torch.optim.AdamW:
        return self._optimizer

    def load_weights(self, weights: WeightReader) -> None:
        names = dict(self._model.named_parameters())  # a tied head is listed once, as the embedding
        found = weights.list_tensors()
        for name in sorted(names.keys() ^ list_module_names(found)):
            where = "the weights lack" if name in names else "the model has no"
            raise PrimusError(f"{where} {name}", "load weights of this model")
        with torch.no_grad():
            for name, parameter in names.items():
                value = read_module_tensor(weights, name, found).to(self._device, torch.float32)
                if isinstance(parameter, DTensor):
                    value = distribute_tensor(value, parameter.device_mesh, parameter.placements, src_data_rank=None)
                parameter.copy_(value)

    def step(self, batches: Sequence[NDArray[np.int64]], learning_rate: float) -> StepValues:
        pairs = [self._place_batch(batch) for batch in batches]
        counts = torch.stack([(targets != -100).sum() for _, targets in pairs]).sum()
        scale = 1.0 / self._sum_over_processes(counts).clamp_min(1).double()
        # float64: a float32 sum of losses differs from the exact one by up to two units in its last place.
        loss = torch.zeros((), dtype=torch.float64, device=self._device)
        for index, (inputs, targets) in enumerate(pairs):
            if isinstance(self._model, FSDPModule):
                self._model.set_requires_gradient_sync(index == len(pairs) - 1)
            part, routers = self._compute_losses(inputs, targets)
            # Losses of routers count by the share of these targets, and are not reported.
            (scale * (part + routers * (targets != -100).sum())).backward()
            loss += scale * part.detach()
        loss, norm = self._sum_over_processes(loss), self._compute_norm()
        skipped = not (bool(loss.isfinite()) and bool(norm.isfinite()))
        if not skipped:
            self._apply_gradients(norm, learning_rate)
        self._optimizer.zero_grad(set_to_none=True)
        return StepValues(loss=loss.item(), grad_norm=norm.item(), skipped=skipped)

    @torch.no_grad()
    def evaluate(self, batches: Sequence[NDArray[np.int64]]) -> tuple[float, int]:
        totals = torch.zeros(2, dtype=torch.float64, device=self._device)
        for batch in batches:
            inputs, targets = self._place_batch(batch)
            totals += torch.stack([self._compute_losses(inputs, targets)[0], (targets != -100).sum().double()])
        loss, tokens = self._sum_over_processes(totals).tolist()
        return loss, int(tokens)

    def save(self, folder: Path) -> None:
        from torch.distributed.checkpoint.state_dict_saver import save

        save(self._get_state(), checkpoint_id=folder, **self._list_process_arguments())

    def load(self, folder: Path) -> None:
        from torch.distributed.checkpoint.state_dict import set_state_dict
        from torch.distributed.checkpoint.state_dict_loader import load

        state = self._get_state()
        load(state, checkpoint_id=folder, **self._list_process_arguments())
        set_state_dict(
            self._model, self._optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
        )

    def watch_step(self) -> StepWatch:
        return self._watch

    def read_settings(self) -> list[LiveSetting]:
        return settings_in_force.read_settings(self._model, self._optimizer, self._watch, self._processes.world)

    def read_memory(self) -> int:
        return read_peak_memory(self._device)

    def _shard_model(self) -> None:
        """Shard each layer, then the rest, over all processes; or keep replicas."""
        training, world = self._trainer.training, self._processes.world
        shard = self._trainer.parallel.use_distributed_optimizer
        sizes = {"shard": world} if shard else {"replicate": world, "shard": 1}
        mesh = init_device_mesh(self._device.type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16 if training.bf16 else None, reduce_dtype=torch.float32)
        for layer in self._model.model.layers:
            fully_shard(layer, mesh=mesh, mp_policy=policy)
        fully_shard(self._model, mesh=mesh, mp_policy=policy)
        for module in self._model.modules():
            if isinstance(module, FSDPModule):
                module.set_gradient_divide_factor(1.0)  # the loss is divided by the tokens of all processes already
                module.set_force_sum_reduction_for_comms(True)  # gloo supports no other reduction

    def _build_optimizer(self) -> torch.optim.AdamW:
        """AdamW; matrices decay, norms and biases do not, as in transformers.Trainer."""
        config = self._trainer.optimizer
        parameters = list(self._model.parameters())
        groups = [
            {"params": [each for each in parameters if each.ndim >= 2], "weight_decay": config.weight_decay},
            {"params": [each for each in parameters if each.ndim < 2], "weight_decay": 0.0},
        ]
        betas = (config.adam_beta1, config.adam_beta2)
        return torch.optim.AdamW(groups, lr=config.lr, betas=betas, eps=config.adam_eps)

    def _place_batch(self, batch: NDArray[np.int64]) -> tuple[Tensor, Tensor]:
        parts = split_inputs_and_targets(batch, self._masked_token)
        inputs, targets = (torch.from_numpy(np.ascontiguousarray(part)).to(self._device) for part in parts)
        return inputs, targets

    def _compute_losses(self, inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Sum of the losses of all tokens that have a target, and the loss of the routers for one token, float64."""
        options = {} if self._trainer.model.num_experts is None else {"output_router_logits": True}
        with self._choose_precision():
            found = self._model(input_ids=inputs, use_cache=False, **options)
        logits = found.logits.float().flatten(0, 1)
        losses = F.cross_entropy(logits, targets.flatten(), ignore_index=-100, reduction="none")
        routers = torch.zeros((), dtype=torch.float64, device=self._device)
        for each in found.router_logits if options else ():
            routers = routers + self._compute_router_loss(each.float())
        return losses.sum(dtype=torch.float64), routers

    def _compute_router_loss(self, logits: Tensor) -> Tensor:
        """Of one layer, [tokens, experts], as Megatron-LM and native: E x sum of (share of choices) x (mean score), and
        the mean square of log-sum-exp. The class of transformers has one balancing loss over all layers."""
        model, (tokens, experts) = self._trainer.model, logits.shape
        counts = torch.bincount(logits.topk(model.moe_router_topk).indices.flatten(), minlength=experts)
        balance = (counts * logits.softmax(-1).sum(0)).sum() * (experts / (tokens * tokens * model.moe_router_topk))
        z = logits.logsumexp(-1).square().mean()
        return model.moe_aux_loss_coeff * balance + self._trainer.backend_args.get(KEYS[0], 0.0) * z

    def _choose_precision(self) -> AbstractContextManager[Any]:
        """Autocast to bf16 in one process; FSDP2's policy casts in several."""
        is_cast = self._trainer.training.bf16 and self._processes.world == 1
        return torch.autocast(self._device.type, torch.bfloat16) if is_cast else nullcontext()

    def _compute_norm(self) -> Tensor:
        """Norm of the whole gradient, float64: a float32 sum over a large matrix loses digits on CPUs."""
        norms = []
        for parameter in self._model.parameters():
            if parameter.grad is not None:
                norm = torch.linalg.vector_norm(parameter.grad, dtype=torch.float64)
                norms.append(norm.full_tensor() if isinstance(norm, DTensor) else norm)
        return torch.linalg.vector_norm(torch.stack(norms))

    def _apply_gradients(self, norm: Tensor, learning_rate: float) -> None:
        clip_grad = self._trainer.optimizer.clip_grad
        factor = float((clip_grad / norm).clamp_max(1.0)) if clip_grad else 1.0
        for parameter in self._model.parameters():
            if parameter.grad is not None and factor < 1.0:
                parameter.grad.mul_(factor)
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate
        self._optimizer.step()

    def _sum_over_processes(self, value: Tensor) -> Tensor:
        if self._processes.world > 1:
            dist.all_reduce(value)
        return value

    def _get_state(self) -> dict[str, Any]:
        from torch.distributed.checkpoint.state_dict import get_state_dict

        weights, moments = get_state_dict(self._model, self._optimizer)
        return {"model": weights, "optimizer": moments}

    def _list_process_arguments(self) -> dict[str, object]:
        alone = self._processes.world == 1
        return {"no_dist": True} if alone else {"process_group": self._processes.writer_group}


def build_model(spec: ModelSpec, is_cast: bool = False) -> Any:
    """The model of Transformers with the shape of `spec`, in float32 on the CPU; `is_cast` for one under autocast."""
    from transformers import AutoConfig, AutoModelForCausalLM

    values = json.loads(format_model_config(spec).text)
    config = AutoConfig.for_model(values.pop("model_type"), **values)
    # Autocast does not know grouped products, which are the default.
    options = {"experts_implementation": "eager"} if spec.num_experts is not None and is_cast else {}
    return AutoModelForCausalLM.from_config(config, attn_implementation="sdpa", dtype=torch.float32, **options)
