"""Results of cells that are fair to compare, of which tests change one thing."""

from __future__ import annotations

import math
import random
from typing import Any

from msgspec import structs

from primus.comparison.results.result import (
    ComparisonResult,
    LoadSample,
    ResultCell,
    ResultDevice,
    ResultFlops,
    ResultInputs,
    ResultLoad,
    ResultMachine,
    ResultMemory,
    ResultSteps,
    ResultTraining,
)

START = 1_700_000_000.0
SETTINGS: dict[str, Any] = {
    "num_layers": 2, "hidden_size": 64, "ffn_hidden_size": 128, "num_attention_heads": 4, "num_query_groups": 2,
    "vocab_size": 500, "vocab_rows": 500, "seq_length": 128, "global_batch_size": 8, "micro_batch_size": 2,
    "bf16": False, "fp8": None, "optimizer": "adamw", "lr": 1e-3, "min_lr": 0.0, "lr_decay_style": "cosine",
    "lr_warmup_iters": 5, "lr_decay_iters": 60, "weight_decay": 0.1, "adam_beta1": 0.9, "adam_beta2": 0.95,
    "adam_eps": 1e-8, "clip_grad": 1.0, "seed": 1234, "recompute_activations": False, "decayed_parameters": 900,
    "undecayed_parameters": 5, "train_iters": 60, "schedule": "primus", "dataloader": "primus",
}  # fmt: skip
NUM_STEPS = 60
TOKENS = 8 * 128


def make_rate(step: int) -> float:
    """The learning rate of a step."""
    if step <= 5:
        return 1e-3 * step / 5
    return 5e-4 * (1 + math.cos(math.pi * (step - 5) / 55))


def make_result(framework: str = "native", *, step_s: float = 0.1, seed: int = 0, **changes: Any) -> ComparisonResult:
    """A result with a compiled first step, a warm-up and noise; `changes` are fields of it."""
    rng = random.Random(f"{framework} {seed}")
    numbers = list(range(1, NUM_STEPS + 1))
    run_speed = rng.lognormvariate(0, 0.003)
    times = [step_s * run_speed * (1 + 0.02 * rng.gauss(0, 1) + (9 if n == 1 else 0.5 * math.exp(-n / 2)))
             for n in numbers]  # fmt: skip
    ended = [START + sum(times[:count]) for count in numbers]
    losses = [6.2 - 0.02 * n + 0.05 * math.sin(n) for n in numbers]
    samples = [LoadSample(time=START + second, cpu_mhz=2500.0, host_energy_j=40.0 * second) for second in range(10)]
    result = ComparisonResult(
        platform="cpu",
        dataset="stdlib",
        timestamp="2026-01-31T10:00:00",
        gpu_info=ResultDevice(device_count=2, device_name="Test CPU"),
        training_config=ResultTraining(max_steps=NUM_STEPS, global_batch_size=8, sequence_length=128, num_gpus=2),
        memory_metrics=ResultMemory(peak_memory_allocated_gb=1.5),
        cell=ResultCell(comparison="test", platform="cpu", framework=framework, model="tiny", repetition=seed + 1),
        precision="float32",
        steps=ResultSteps(
            number=numbers,
            time_s=[*times],
            ended=[*ended],
            tokens=[float(TOKENS)] * NUM_STEPS,
            loss=[*losses],
            learning_rate=[make_rate(n) for n in numbers],
        ),
        flops=ResultFlops(
            flops_per_token=1.2e6, convention="causal", by_convention={"causal": 1.2e6, "full": 1.4e6},
            peak_tflops=0.05,
        ),
        settings=dict(SETTINGS),
        inputs=ResultInputs(tokens=[f"{n:08x}" for n in numbers], weights="f" * 64, tokenizer="byte"),
        machine=ResultMachine(host="one", threads=1),
        load=ResultLoad(samples=samples, other_cpu_share=0.01),
    )  # fmt: skip
    return structs.replace(result, **changes)


def change_settings(result: ComparisonResult, **settings: Any) -> ComparisonResult:
    """The result of other settings."""
    return structs.replace(result, settings={**result.settings, **settings})
