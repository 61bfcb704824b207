"""Small models, and the steps that native and an engine take from the same weights on the same tokens.

Runs in the interpreter of the engine: `engine_python.run_engine("jax", "import engine_steps; ...")`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import torch
import trained_weights
from numpy.typing import NDArray

from primus.checkpoint.renaming import HubNames
from primus.checkpoint.weights import TensorDict
from primus.config.schedule import compute_learning_rate
from primus.config.schema import ModelSpec, OptimizerConfig, Trainer, TrainingConfig
from primus.data.training.masks import split_inputs_and_targets
from primus.frameworks.native.engine import model as native_model
from primus.frameworks.native.engine import step as native_step
from primus.frameworks.native.engine.optimizer import build_optimizer
from primus.session.engine import Engine

STEPS = 20
TRAINED_STEPS = 4
SEQUENCE, MICRO_BATCH, NUM_MICRO_BATCHES = 32, 4, 2
KINDS: dict[str, dict[str, Any]] = {
    "llama": {
        "rope_type": "llama3",
        "rotary_scaling_factor": 8.0,
        "original_max_position_embeddings": 16,
        "rotary_base": 500000.0,
    },
    "llama-tied": {"untie_embeddings_and_output_weights": False},
    "qwen2.5": {"add_qkv_bias": True, "untie_embeddings_and_output_weights": False, "norm_epsilon": 1e-6},
    "qwen3": {"qk_layernorm": True, "kv_channels": 32, "norm_epsilon": 1e-6, "rotary_base": 1e6},
}
Steps = list[list[float]]
"""Loss and gradient norm of each step."""


def build_trainer(kind: str, **changes: dict[str, Any]) -> Trainer:
    spec = ModelSpec(
        num_layers=2,
        hidden_size=64,
        ffn_hidden_size=176,
        num_attention_heads=4,
        num_query_groups=2,
        vocab_size=256,
        max_position_embeddings=128,
        **KINDS[kind],
    )
    training = TrainingConfig(
        train_iters=STEPS,
        micro_batch_size=MICRO_BATCH,
        global_batch_size=MICRO_BATCH * NUM_MICRO_BATCHES,
        seq_length=SEQUENCE,
        bf16=False,
    )
    trainer = Trainer(model=spec, training=training, optimizer=OptimizerConfig(lr=3e-3, min_lr=3e-4, lr_warmup_iters=5))
    for group, values in changes.items():
        trainer = msgspec.structs.replace(
            trainer, **{group: msgspec.structs.replace(getattr(trainer, group), **values)}
        )
    return trainer


def draw_tokens(steps: int = STEPS) -> NDArray[np.int64]:
    """Micro batches of each step, [step, micro batch, B, S + 1]."""
    return np.random.default_rng(0).integers(0, 256, (steps, NUM_MICRO_BATCHES, MICRO_BATCH, SEQUENCE + 1))


def draw_weights(trainer: Trainer) -> TensorDict:
    """Native's initial weights; biases and norms of heads are moved away from 0 and 1, which would hide errors."""
    model = native_model.build_model(trainer.model, "cpu", seed=1)
    hub = HubNames(TensorDict(model.state_dict()), trainer.model, "native")
    generator = torch.Generator().manual_seed(2)
    tensors = {name: hub.read(name).clone() for name in hub.list_tensors()}
    for name, tensor in tensors.items():
        if name.endswith((".bias", "q_norm.weight", "k_norm.weight")):
            tensor += 0.1 * torch.randn(tensor.shape, generator=generator)
    return TensorDict(tensors)


def compute_rates(trainer: Trainer) -> list[float]:
    return [compute_learning_rate(step + 1, trainer.optimizer, STEPS) for step in range(STEPS)]


def train_native(
    trainer: Trainer,
    eod_id: int | None = None,
    *,
    weights: TensorDict | None = None,
    tokens: NDArray[np.int64] | None = None,
) -> Steps:
    """Steps of native in float64, by which engines are judged."""
    from primus.checkpoint.renaming import EngineNames
    from primus.data.training.masks import DocumentHandling

    model = native_model.build_model(trainer.model, "cpu", seed=1)
    named = EngineNames(weights or draw_weights(trainer), trainer.model, "native")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(named.read(name))
    model.to(torch.float64)
    data = trainer.data
    if eod_id is not None:
        model.documents = DocumentHandling(eod_id, data.reset_position_ids, data.reset_attention_mask)
    model.configure(trainer.training)
    trainable = native_step.prepare_model(model, device="cpu")
    optimizer = build_optimizer(model, trainer.optimizer)
    found = []
    for batches, rate in zip(draw_tokens() if tokens is None else tokens, compute_rates(trainer), strict=False):
        pairs = [split_inputs_and_targets(batch, eod_id if data.eod_mask_loss else None) for batch in batches]
        tensors = [tuple(torch.from_numpy(np.ascontiguousarray(part)) for part in pair) for pair in pairs]
        result = native_step.train_step(
            trainable, optimizer, tensors, learning_rate=rate, clip_grad=trainer.optimizer.clip_grad
        )
        found.append([result.loss, result.grad_norm])
    return found


def train_engine(
    engine: Engine,
    trainer: Trainer,
    first: int = 0,
    last: int = STEPS,
    *,
    tokens: NDArray[np.int64] | None = None,
) -> Steps:
    """Steps `first` to `last` of an engine that has its weights."""
    batches, rates = draw_tokens() if tokens is None else tokens, compute_rates(trainer)
    values = [engine.step(list(batches[step]), rates[step]) for step in range(first, last)]
    return [[value.loss, value.grad_norm] for value in values]


def measure_differences(native: Steps, engine: Steps) -> dict[str, float]:
    """Loss of the first step and of all, and gradient norm: the largest differences, the norm's relative."""
    losses = [abs(ours[0] - theirs[0]) for ours, theirs in zip(native, engine, strict=True)]
    norms = [abs(ours[1] - theirs[1]) / ours[1] for ours, theirs in zip(native, engine, strict=True)]
    return {"first": losses[0], "loss": max(losses), "grad_norm": max(norms)}


def compare_with_native(
    build_engine: Callable[[Trainer, int | None], Engine],
    trainer: Trainer,
    eod_id: int | None = None,
    *,
    native: Steps | None = None,
) -> dict[str, float]:
    """Differences of an engine from `native`, whose steps are taken here if they are not given."""
    engine = build_engine(trainer, eod_id)
    engine.load_weights(draw_weights(trainer))
    return measure_differences(native or train_native(trainer, eod_id), train_engine(engine, trainer))


def compare_trained_model(build_engine: Callable[[Trainer, int | None], Engine]) -> dict[str, float]:
    """Differences of an engine from native where both begin with trained weights and a vocabulary of real size."""
    trainer = build_trainer("llama")
    trainer = msgspec.structs.replace(trainer, model=trained_weights.enlarge_vocabulary(trainer.model))
    weights = trained_weights.train_weights(trainer.model)
    shape = (TRAINED_STEPS, NUM_MICRO_BATCHES, MICRO_BATCH, SEQUENCE + 1)
    tokens = trained_weights.draw_frequent_tokens(trainer.model, *shape, seed=99)
    engine = build_engine(trainer, None)
    engine.load_weights(weights)
    steps = train_engine(engine, trainer, last=TRAINED_STEPS, tokens=tokens)
    return measure_differences(train_native(trainer, weights=weights, tokens=tokens), steps)
