"""Token files that are easy to learn, but for a document of noise that makes the loss jump at a known step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from primus.data.megatron.indexed_dataset import IndexedWriter, choose_smallest_dtype

LENGTH, BATCH = 32, 4
NOISE = 100
"""The least token of the noise."""
SEED = 264
"""With it the noise is in one step, after the loss has fallen."""
BAD_STEP = 28


def settings(folder: Path, **changes: Any) -> dict[str, Any]:
    """Settings of a run whose loss jumps at `BAD_STEP`."""
    prefix = write(folder / "spiky")
    return {
        "mock_data": False,
        "train_data_path": str(prefix),
        "split": "100",
        "seed": SEED,
        "seq_length": LENGTH,
        "micro_batch_size": 2,
        "global_batch_size": BATCH,
        "train_iters": 36,
        "save_interval": 4,
        "lr": 1e-2,
        "lr_decay_style": "constant",
        "loss_spike_window": 8,
        "loss_spike_factor": 30.0,
        "sample_tokens": 0,
        **changes,
    }


def write(prefix: Path, documents: int = 200) -> Path:
    """Write the tokens unless they are there."""
    if prefix.with_suffix(".idx").exists():
        return prefix
    random = np.random.default_rng(0)
    with IndexedWriter(prefix, choose_smallest_dtype(512)) as writer:
        for _ in range(documents - 1):
            writer.add_document((np.arange(LENGTH) + random.integers(16)) % 16)
        writer.add_document(random.integers(NOISE, 500, LENGTH))
        writer.commit()
    return prefix
