"""How a step is laid out over devices: what the prediction needs of an experiment, or of a published row."""

from __future__ import annotations

import math
from typing import Any, Literal

from msgspec import Struct

from primus.config.checks import data_parallel_size
from primus.config.schema import Trainer
from primus.errors import UsageError
from primus.models.communication import GroupSizes

Recompute = Literal["none", "scores", "alternate", "full"]
"""What the backward pass computes again: nothing; attention's scores (Megatron-LM's selective recomputation); every
second product of a layer with all that is element-wise (torchtitan's selective checkpoints); or the whole layer."""
Precision = Literal["fp32", "bf16", "fp8", "fp4"]
"""Of matrix products."""


OPTIMIZER_SHARDING = ("megatron", "megatron_bridge")
"""Frameworks whose distributed optimizer shards its state alone (ZeRO-1); the others shard weights too."""

GRANULARITY = "recompute_granularity"
"""Megatron-LM's setting, which native has too."""

NATIVE_ACTIVATIONS = 1.1
"""Of native, whose layers keep 1.05 (Qwen 2.5 7B) to 1.21 (DeepSeek-V3) times what the formulas count, by
`analyze layout`, which executes them."""
NATIVE_WINDOWS = 1.6
"""The same of models with windows, softly limited scores or sinks: 1.4 (Gemma 2) to 1.7 (gpt-oss)."""
NATIVE_LOGITS = 2**30
"""Bytes of logits that native has at once (`CHUNK_BYTES` of its loss)."""


class StepLayout(Struct, frozen=True, kw_only=True):
    """One step on `devices` devices."""

    devices: int
    tensor: int = 1
    pipeline: int = 1
    virtual: int = 1
    """Groups of layers on each pipeline stage (interleaved schedule)."""
    context: int = 1
    expert: int = 1
    micro_batch: int = 1
    global_batch: int
    seq_length: int
    precision: Precision = "bf16"
    recompute: Recompute = "none"
    sharding: Literal["none", "optimizer", "full"] = "full"
    """What the data-parallel devices share: nothing, the optimizer's state (ZeRO-1), or weights and gradients too
    (FSDP)."""
    sequence_parallel: bool = True
    fused: bool = True
    """Element-wise operations are compiled or have kernels of their own."""
    tensor_overlap: bool = False
    """Tensor-parallel collectives run in pieces beside their products (asynchronous TP, user buffers)."""
    logit_bytes: int = 12
    """Of one logit: bfloat16 and float32 copies and the gradient; 0 where the loss runs in chunks."""
    accumulates_gradients: bool = False
    """Gradients are reduced once a step, and until then each device of FSDP holds all of its stage."""
    kept_activations: float = 1.0
    """What the engine keeps for the backward pass, over what the formulas count."""
    keeps_expert_outputs: bool = True
    """Also the products of gate and up, and the rows that experts give; else these are computed again."""
    most_logits: float = math.inf
    """Bytes of logits at once; where there are more, gradients of the head are added up in fp32."""
    flash: bool = True
    """Attention keeps no scores, and there is no dropout that keeps masks; false is GPT-3 before flash attention."""

    @property
    def data(self) -> int:
        """Replicas of the model."""
        return self.devices // (self.tensor * self.context * self.pipeline)

    @property
    def micro_batches(self) -> int:
        """Micro batches of one replica in a step."""
        return self.global_batch // (self.data * self.micro_batch)

    @property
    def accumulates_whole(self) -> bool:
        """Whether a device of FSDP holds gradients that are not sharded."""
        return self.sharding == "full" and self.accumulates_gradients and self.micro_batches > 1

    @property
    def value_bytes(self) -> int:
        """Bytes of one activation."""
        return 4 if self.precision == "fp32" else 2

    @property
    def tokens(self) -> int:
        """Tokens of one micro batch on one device, before tensor parallelism."""
        return self.micro_batch * self.seq_length // self.context

    @property
    def groups(self) -> GroupSizes:
        return GroupSizes(
            tensor=self.tensor, context=self.context, pipeline=self.pipeline, expert=self.expert, data=self.data
        )

    def format_settings(self) -> str:
        """The layout in one line: ``tp 8, pp 4, dp 16, micro batch 1 x 32, full recompute``."""
        sizes = {
            "tp": self.tensor, "pp": self.pipeline, "vpp": self.virtual, "cp": self.context, "ep": self.expert
        }  # fmt: skip
        parts = [f"{name} {size}" for name, size in sizes.items() if size > 1]
        parts += [f"dp {self.data}", f"micro batch {self.micro_batch} x {self.micro_batches}"]
        if self.recompute != "none":
            parts.append(f"{self.recompute} recompute")
        return ", ".join([*parts, self.precision])


def build_layout(trainer: Trainer, devices: int) -> StepLayout:
    """The layout of an experiment on `devices` devices.

    Raises:
        UsageError: The sizes do not divide the devices, or the batch does not divide over them.
    """
    parallel, training = trainer.parallel, trainer.training
    data = data_parallel_size(parallel, devices)
    if (data * parallel.context_parallel_size * parallel.tensor_model_parallel_size) % (
        parallel.expert_model_parallel_size
    ):
        raise UsageError(
            f"expert_model_parallel_size: {parallel.expert_model_parallel_size} does not divide the"
            f" {devices // parallel.pipeline_model_parallel_size} devices of a pipeline stage",
            "use a divisor of them",
        )
    batch = training.global_batch_size or training.micro_batch_size * data
    if batch % (training.micro_batch_size * data):
        raise UsageError(
            f"global_batch_size: {batch} is not a multiple of micro_batch_size x data-parallel size ="
            f" {training.micro_batch_size} x {data}",
            f"use a multiple of {training.micro_batch_size * data}, or other sizes",
        )
    native = trainer.framework == "native"
    is_recomputed = training.recompute_activations or _find_setting(trainer.backend_args, GRANULARITY) == "full"
    return StepLayout(
        devices=devices,
        tensor=parallel.tensor_model_parallel_size,
        pipeline=parallel.pipeline_model_parallel_size,
        virtual=int(_find_setting(trainer.backend_args, "num_virtual_stages_per_pipeline_rank") or 1),
        context=parallel.context_parallel_size,
        expert=parallel.expert_model_parallel_size,
        micro_batch=training.micro_batch_size,
        global_batch=batch,
        seq_length=training.seq_length,
        precision="fp8" if training.fp8 else "bf16" if training.bf16 else "fp32",
        recompute="full" if is_recomputed else "none",
        sharding=_find_sharding(trainer),
        sequence_parallel=parallel.sequence_parallel,
        fused=trainer.framework != "torchtitan" or training.compile is not False,
        logit_bytes=(4 if training.bf16 else 8) if native else 12,
        accumulates_gradients=native,
        kept_activations=(NATIVE_WINDOWS if trainer.model.window_size else NATIVE_ACTIVATIONS) if native else 1.0,
        keeps_expert_outputs=not native,
        most_logits=NATIVE_LOGITS if native else math.inf,
    )


def _find_sharding(trainer: Trainer) -> Literal["none", "optimizer", "full"]:
    if not trainer.parallel.use_distributed_optimizer:
        return "none"
    has_fsdp = any(_find_setting(trainer.backend_args, name) for name in ("use_megatron_fsdp", "use_torch_fsdp2"))
    return "optimizer" if trainer.framework in OPTIMIZER_SHARDING and not has_fsdp else "full"


def _find_setting(values: dict[str, Any], name: str) -> Any:
    return next((value for key, value in values.items() if key.rpartition(".")[2] == name), None)
