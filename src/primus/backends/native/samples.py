"""A short text by the trained model."""

from __future__ import annotations

from pathlib import Path

from primus.backends.native.generate import generate_tokens
from primus.backends.native.model import Transformer
from primus.config.schema import LoggingConfig
from primus.data.tokenizers.load import load_tokenizer
from primus.data.training.dataset import Datasets
from primus.runs.files import write_text

TEMPERATURE = 0.8
"""Below 1, so that a small model stays on the likelier side of what it knows."""


def generate_sample(model: Transformer, data: Datasets, config: LoggingConfig, seed: int) -> str | None:
    """The prompt and what the model makes of it; None where the tokenizer of the data is not known.

    Where the model is sharded, every process must call this alike.
    """
    if data.tokenizer_path is None:
        return None
    tokenizer = load_tokenizer(data.tokenizer_path)
    prompt = tokenizer.encode(config.sample_prompt)
    if data.eod_id is not None:
        prompt = [data.eod_id, *prompt]  # a document begins after the end of another
    if not prompt:
        return None
    generated = generate_tokens(model, prompt, config.sample_tokens, TEMPERATURE, seed)
    return config.sample_prompt + tokenizer.decode(generated)


def write_sample(path: Path, text: str) -> None:
    """Keep the sample with the run's reports."""
    write_text(path, text + "\n")
