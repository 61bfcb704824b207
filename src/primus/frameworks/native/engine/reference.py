"""A short training whose bits depend only on the device and its libraries, to compare devices."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from msgspec import structs
from torch.nn.attention import SDPBackend, sdpa_kernel

from primus.config.extended_files import load_model
from primus.config.schema import OptimizerConfig
from primus.frameworks.native.engine import kernel_trial, model
from primus.frameworks.native.engine.optimizer import build_optimizer
from primus.frameworks.native.engine.step import prepare_model, train_step

MODELS = {"cuda": "llama_quickstart.yaml", "cpu": "tiny.yaml"}
"""The quick start's model is too large for the many processes that may share a CPU."""
STEPS = 10
BATCH_SIZE = 4
SEQUENCE = 256
SEED = 1234
LEARNING_RATE = 1e-3


def train(device: torch.device) -> tuple[str, float]:
    """A digest of the loss of each step and of all weights after the last one, and the last loss."""
    spec = load_model(MODELS[device.type])
    with _use_repeatable_kernels():
        built = model.build_model(spec, device, SEED)
        built.compute_dtype = torch.bfloat16 if device.type == "cuda" else None
        trainable = prepare_model(built, device=device)
        optimizer = build_optimizer(trainable.model, OptimizerConfig(lr=LEARNING_RATE))
        generator = torch.Generator().manual_seed(SEED)
        digest, loss = hashlib.sha256(), torch.zeros(())
        for _ in range(STEPS):
            tokens = torch.randint(spec.vocab_size, (BATCH_SIZE, SEQUENCE + 1), generator=generator).to(device)
            batch = (tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())
            result = train_step(trainable, optimizer, [batch], learning_rate=LEARNING_RATE, clip_grad=1.0)
            loss = result.values[0].cpu()
            digest.update(result.values.cpu().numpy().tobytes())
        for _, weight in sorted(trainable.model.named_parameters()):
            digest.update(weight.detach().cpu().numpy().tobytes())
    return digest.hexdigest()[:16], float(loss)


def try_kernels(device: torch.device) -> list[tuple[str, str]]:
    """The kernels of a layer with a feed-forward and of one with experts, and what is wrong with each.

    Their shapes are those of a small layer of Llama 3 on a GPU, where products are in bfloat16.
    """
    is_gpu = device.type == "cuda"
    spec = load_model(MODELS["cpu"])
    if is_gpu:
        spec = structs.replace(spec, hidden_size=1024, ffn_hidden_size=4096, num_attention_heads=8, num_query_groups=2)
    tried = []
    for experts in (None, 8):
        changed = structs.replace(spec, num_layers=1, num_experts=experts)
        built = model.build_model(changed, device, SEED)
        built.compute_dtype = torch.bfloat16 if is_gpu else None
        tried += kernel_trial.try_kernels(kernel_trial.list_kernels(built, device, 1, 4096 if is_gpu else SEQUENCE))
    return [(each.name, each.problem) for each in tried]


@contextmanager
def _use_repeatable_kernels() -> Iterator[None]:
    """Use only kernels that repeat bit by bit: attention by plain matrix products, and no atomic sums.

    On one stream cuBLAS repeats bit by bit with any workspace (cuBLAS documentation, reproducibility); the warning of
    PyTorch is about several streams.
    """
    before = torch.are_deterministic_algorithms_enabled()
    with warnings.catch_warnings(), sdpa_kernel(SDPBackend.MATH):
        warnings.simplefilter("ignore")
        torch.use_deterministic_algorithms(True, warn_only=True)
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(before)
