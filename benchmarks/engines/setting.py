"""What is trained: the same shape, batch and optimizer for every engine."""

from __future__ import annotations

from dataclasses import dataclass

LEARNING_RATE = 3e-4
BETAS = (0.9, 0.95)
EPSILON = 1e-8
WEIGHT_DECAY = 0.1
CLIP = 1.0
SEED = 1234


@dataclass(frozen=True)
class Setting:
    """A Llama or Mixtral shape with untied embeddings, and how it is trained."""

    vocab: int
    bf16: bool
    compile: bool
    dim: int = 256
    layers: int = 8
    heads: int = 8
    groups: int | None = None
    """Key/value heads; as many as `heads` when None."""
    ffn: int = 768
    sequence: int = 256
    batch: int = 8
    norm_epsilon: float = 1e-5
    rope_theta: float = 10000.0
    experts: int | None = None
    """Each of width `ffn`; None for a dense model."""
    experts_of_token: int = 2
    device: str = "cpu"
    expert_kernel: str = "eager"
    """How transformers computes experts (integrations/moe.py of transformers)."""
