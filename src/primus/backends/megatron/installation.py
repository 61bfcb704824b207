"""What is installed next to megatron-core; imports neither."""

from __future__ import annotations

from importlib.util import find_spec


def has_transformer_engine() -> bool:
    """Whether this interpreter has Transformer Engine."""
    return find_spec("transformer_engine") is not None
