"""Weights of a model that the tests train themselves: its logits differ as those of published models do.

Random weights give logits that are nearly equal, which hides what a sum over the vocabulary loses.
"""

from __future__ import annotations

import numpy as np
import torch
from msgspec import structs
from numpy.typing import NDArray

from primus.checkpoint.renaming import HubNames
from primus.checkpoint.weights import TensorDict
from primus.config.schema import ModelSpec, OptimizerConfig
from primus.frameworks.native.engine.model import build_model
from primus.frameworks.native.engine.optimizer import build_optimizer
from primus.frameworks.native.engine.step import prepare_model, train_step

VOCABULARY = 12_345
"""Large, and not a multiple of a vector register's elements."""
STEPS = 60
SMALLEST_SPREAD = 10.0
"""Difference of the largest logit from the mean of its row; it is 0.6 with random weights, and about 14 here. The cross
entropy of PyTorch on a CPU is then off by 3.6e-6, and with random weights by 2e-8."""


def draw_frequent_tokens(spec: ModelSpec, *shape: int, seed: int = 0) -> NDArray[np.int64]:
    """Tokens by Zipf's law: most are a few of the vocabulary, and each hints at the next one."""
    random = np.random.default_rng(seed)
    drawn = random.zipf(1.6, shape) % spec.vocab_size
    drawn[..., 1::2] = (drawn[..., 0:-1:2][..., : drawn[..., 1::2].shape[-1]] * 7 + 1) % spec.vocab_size
    return drawn.astype(np.int64)


def train_weights(spec: ModelSpec) -> TensorDict:
    """Weights under hub names after a short training on such tokens, by native."""
    model = build_model(spec, "cpu", seed=1)
    trainable = prepare_model(model, device="cpu")
    optimizer = build_optimizer(model, OptimizerConfig(lr=1e-2))
    for step in range(STEPS):
        tokens = torch.from_numpy(draw_frequent_tokens(spec, 8, 33, seed=step))
        batch = (tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())
        train_step(trainable, optimizer, [batch], learning_rate=1e-2, clip_grad=1.0)
    with torch.no_grad():
        logits = model(tokens[:, :-1]) @ model.output_weight.t()
        spread = float((logits.amax(-1) - logits.mean(-1)).mean())
    assert spread > SMALLEST_SPREAD, spread
    names = HubNames(TensorDict(model.state_dict()), spec, "native")
    return TensorDict({name: names.read(name).clone() for name in names.list_tensors()})


def enlarge_vocabulary(spec: ModelSpec) -> ModelSpec:
    """The model with a vocabulary of real size."""
    return structs.replace(spec, vocab_size=VOCABULARY)
