"""Megatron-Bridge: its models, weights and adapters on Megatron-Core, with the loop and the data of primus."""

from __future__ import annotations

from primus.frameworks.megatron_bridge.settings import NAMES

ENGINES = ("megatron-bridge",)
KEYS = NAMES
"""Settings of adapters and recipes."""
STAGES = ("pre_trainer", "post_trainer")
USES_TORCH = True
