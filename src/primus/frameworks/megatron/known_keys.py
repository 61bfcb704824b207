"""What is known of Megatron-LM's arguments and of Primus' keys, which `tools/megatron_arguments.py` writes."""

from __future__ import annotations

from pathlib import Path

from primus.config.translation.known_keys import KnownKeys, read_known_keys

FOLDER = Path(__file__).parent
CHECKOUT_KEYS = frozenset(
    "activation_clamp add_bias_linear attention_sinks mtp_num_layers rotary_percent"
    " yarn_correction_range_round_to_int".split()
)
"""Keys that Megatron-LM has arguments for, and that are refused without it."""


def read_arguments() -> KnownKeys:
    """The arguments of Megatron-LM by dest, with their flags, types, defaults, releases and effects."""
    return read_known_keys(FOLDER / "arguments.json")


def read_primus_keys() -> KnownKeys:
    """Keys of Primus' Megatron presets that are no arguments of Megatron-LM: settings of its patches and models."""
    return read_known_keys(FOLDER / "primus_keys.json")
