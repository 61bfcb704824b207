"""Published speeds of training whose whole layout is known, to compare predictions with."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any, Literal

import msgspec
import yaml
from msgspec import Struct, structs

from primus.config.extended_files import load_model
from primus.config.schema import ModelSpec
from primus.machine.profile import find_profile
from primus.prediction.device_rates import DeviceRates, read_rates
from primus.prediction.step_layout import StepLayout

FILE = Path(__file__).with_name("published_steps.yaml")
ROW_KEYS = ("use", "model", "device", "tokens_per_s", "source", "rates", "memory_gib")
CUSTOM_RATES = {
    "h100_500w": {"tflops": {"fp32": 300.0, "bf16": 600.0, "fp8": 1060.0}, "memory_gb_per_s": 2400.0},
}
"""Devices of single rows that no profile describes; see the head of the file."""
GPT_SHAPES = {
    # layers, hidden size, heads: arXiv:2205.05198, table 3
    "gpt_22B": (48, 6144, 64),
    "gpt3_175B": (96, 12288, 96),
    "gpt_530B": (105, 20480, 128),
    "gpt_1T": (128, 25600, 160),
}


class PublishedStep(Struct, frozen=True, kw_only=True):
    """One row."""

    use: Literal["fit", "held"]
    model: str
    device: str
    tokens_per_s: float
    """Of one device."""
    source: str
    layout: StepLayout
    rates: str | None = None
    memory_gib: float | None = None
    """Peak that the source reports."""

    @property
    def spec(self) -> ModelSpec:
        if self.model in GPT_SHAPES:
            layers, hidden, heads = GPT_SHAPES[self.model]
            return ModelSpec(
                num_layers=layers, hidden_size=hidden, ffn_hidden_size=8 * hidden // 3, num_attention_heads=heads,
                vocab_size=51200, untie_embeddings_and_output_weights=False,
            )  # fmt: skip
        return load_model(self.model)

    def read_rates(self) -> DeviceRates:
        """Rates of the row's device."""
        found = read_rates(find_profile(self.device), 8)
        return structs.replace(found, **CUSTOM_RATES[self.rates]) if self.rates else found


@cache
def read_published_steps() -> tuple[PublishedStep, ...]:
    """All rows, in the order of the file."""
    return tuple(map(_convert_row, yaml.safe_load(FILE.read_text(encoding="utf-8"))))


def _convert_row(row: dict[str, Any]) -> PublishedStep:
    own = {key: row[key] for key in ROW_KEYS if key in row}
    layout = {key: value for key, value in row.items() if key not in own}
    return msgspec.convert({**own, "layout": layout}, PublishedStep, strict=False)
