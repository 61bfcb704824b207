"""Small models, native's losses for them, and processes of the engine that are given the same weights and tokens."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch

from frameworks.engine_processes import ask_engine
from frameworks.trained_weights import draw_frequent_tokens, enlarge_vocabulary, train_weights
from primus.checkpoint.renaming import HubNames
from primus.checkpoint.weights import TensorDict
from primus.config.schedule import compute_learning_rate
from primus.config.schema import ModelSpec, OptimizerConfig, Trainer, TrainingConfig
from primus.frameworks.native.engine.model import Transformer, build_model, load_weights
from primus.frameworks.native.engine.optimizer import build_optimizer
from primus.frameworks.native.engine.step import prepare_model, train_step

STEPS = 20
TRAINED_STEPS = 4
STEPS_OF_PROCESSES = 8
"""Steps of several processes, which wait for each other at every collective."""
SEQUENCE, MICRO_BATCH, GLOBAL_BATCH = 32, 2, 8
KINDS: dict[str, dict[str, Any]] = {
    "llama": {
        "rope_type": "llama3",
        "rotary_scaling_factor": 8.0,
        "original_max_position_embeddings": 32,
        "rotary_base": 500000.0,
    },
    "llama-tied": {"untie_embeddings_and_output_weights": False},
    "qwen2.5": {
        "add_qkv_bias": True,
        "untie_embeddings_and_output_weights": False,
        "norm_epsilon": 1e-6,
        "rotary_base": 1e6,
    },
    "qwen3": {
        "qk_layernorm": True,
        "kv_channels": 16,
        "untie_embeddings_and_output_weights": False,
        "norm_epsilon": 1e-6,
        "rotary_base": 1e6,
    },
    "qwen3-untied": {"qk_layernorm": True, "kv_channels": 16, "norm_epsilon": 1e-6, "rotary_base": 1e6},
}
SCRIPT = Path(__file__).with_name("engine_process.py")
Steps = list[tuple[float, float]]
"""Loss and gradient norm of each step."""


def build_trainer(kind: str, **changes: Any) -> Trainer:
    spec = ModelSpec(
        num_layers=2,
        hidden_size=64,
        ffn_hidden_size=176,
        num_attention_heads=8,
        num_query_groups=4,
        vocab_size=512,
        max_position_embeddings=256,
        **KINDS[kind],
    )
    training = TrainingConfig(
        train_iters=STEPS,
        micro_batch_size=MICRO_BATCH,
        global_batch_size=GLOBAL_BATCH,
        seq_length=SEQUENCE,
        bf16=False,
    )
    optimizer = OptimizerConfig(lr=2e-3, min_lr=2e-4, lr_warmup_iters=5)
    trainer = Trainer(framework="torchtitan", model=spec, training=training, optimizer=optimizer)
    for group, values in changes.items():
        trainer = msgspec.structs.replace(
            trainer, **{group: msgspec.structs.replace(getattr(trainer, group), **values)}
        )
    return trainer


def draw_tokens(trainer: Trainer) -> Any:
    """Tokens of each step, [step, sample, S + 1]: a random walk, which a model learns."""
    random = np.random.default_rng(0)
    following = random.integers(0, trainer.model.vocab_size, (trainer.model.vocab_size, 4))
    shape = (STEPS, GLOBAL_BATCH, SEQUENCE + 1)
    choices, tokens = random.integers(0, 4, shape), np.empty(shape, dtype=np.int64)
    tokens[..., 0] = random.integers(0, trainer.model.vocab_size, shape[:2])
    for place in range(1, SEQUENCE + 1):
        tokens[..., place] = following[tokens[..., place - 1], choices[..., place]]
    return tokens


def build_native_model(trainer: Trainer) -> Transformer:
    """Native's initial weights; biases and norms of queries and keys are no longer 0 and 1, which would hide errors."""
    model = build_model(trainer.model, "cpu", seed=1234)
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith("bias"):
                weight.add_(0.05 * torch.randn(weight.shape, generator=generator))
            elif name.endswith(("query_norm.weight", "key_norm.weight")):
                weight.add_(0.1 * torch.randn(weight.shape, generator=generator))
    return model


def compute_rates(trainer: Trainer) -> list[float]:
    return [compute_learning_rate(step, trainer.optimizer, STEPS) for step in range(1, STEPS + 1)]


def train_native(
    trainer: Trainer, tokens: Any, steps: int = STEPS, dtype: torch.dtype = torch.float64, weights: Any = None
) -> Steps:
    """Losses and gradient norms of native in one process; in float64, by which engines are judged."""
    model = build_native_model(trainer)
    if weights is not None:
        load_weights(model, weights)
    model.to(dtype)
    model.configure(trainer.training)
    trainable = prepare_model(model, device="cpu")
    optimizer = build_optimizer(model, trainer.optimizer)
    found = []
    for step, rate in zip(range(steps), compute_rates(trainer), strict=False):
        micro = torch.from_numpy(tokens[step]).split(MICRO_BATCH)
        pairs = [(batch[:, :-1].contiguous(), batch[:, 1:].contiguous()) for batch in micro]
        result = train_step(trainable, optimizer, pairs, learning_rate=rate, clip_grad=trainer.optimizer.clip_grad)
        found.append((result.loss, result.grad_norm))
    return found


def write_start(folder: Path, trainer: Trainer) -> dict[str, str]:
    """Files of the tokens and of the initial weights, as parts of a request."""
    folder.mkdir(parents=True, exist_ok=True)
    tokens, weights = folder / "tokens.npy", folder / "weights.pt"
    np.save(tokens, draw_tokens(trainer))
    hub = HubNames(TensorDict(build_native_model(trainer).state_dict()), trainer.model, "native")
    torch.save({name: hub.read(name).contiguous() for name in hub.list_tensors()}, weights)
    return {"tokens": str(tokens), "weights": str(weights)}


def measure_trained_model(folder: Path, engine: str, script: Path) -> list[float]:
    """Differences of the losses of an engine from native's in float64, from trained weights."""
    trainer = build_trainer("llama")
    trainer = msgspec.structs.replace(trainer, framework=engine, model=enlarge_vocabulary(trainer.model))
    weights = train_weights(trainer.model)
    tokens = draw_frequent_tokens(trainer.model, TRAINED_STEPS, GLOBAL_BATCH, SEQUENCE + 1, seed=99)
    np.save(folder / "tokens.npy", tokens)
    torch.save({name: weights.read(name) for name in weights.list_tensors()}, folder / "weights.pt")
    start = {"tokens": str(folder / "tokens.npy"), "weights": str(folder / "weights.pt"), "last": TRAINED_STEPS}
    (found,) = train_by_engine(folder, [(trainer, start)], engine=engine, script=script)
    expected = train_native(trainer, tokens, TRAINED_STEPS, weights=weights)
    return [abs(mine[0] - native[0]) for mine, native in zip(found["steps"], expected, strict=True)]


def train_by_engine(
    folder: Path,
    requests: Sequence[tuple[Trainer, dict[str, Any]]],
    *,
    world: int = 1,
    engine: str = "torchtitan",
    script: Path = SCRIPT,
) -> list[dict[str, Any]]:
    """What the engine reports for each request, one after the other in the same processes; see `engine_service`."""
    folder.mkdir(parents=True, exist_ok=True)
    return ask_engine(
        engine,
        script,
        world,
        [
            {
                "trainer": msgspec.to_builtins(trainer),
                "folder": str(folder),
                "rates": compute_rates(trainer),
                "last": STEPS,
                **request,
            }
            for trainer, request in requests
        ],
    )
