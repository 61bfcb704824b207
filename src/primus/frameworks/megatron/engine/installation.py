"""What the layers of megatron-core find next to it; imports nothing of it."""

from __future__ import annotations

from importlib.util import find_spec


def has_transformer_engine() -> bool:
    """Whether this interpreter has Transformer Engine."""
    return find_spec("transformer_engine") is not None


def list_available(device_type: str, uses_transformer_engine: bool) -> list[str]:
    """What settings may need of this machine: see `MegatronSetting.needs`."""
    needs = {"gpu": device_type == "cuda", "transformer_engine": uses_transformer_engine}
    return [name for name, is_there in needs.items() if is_there]
