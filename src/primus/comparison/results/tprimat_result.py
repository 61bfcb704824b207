"""A result of tprimat in the form of ours."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

UNKNOWN_WORDS = ("N/A", "n/a", "unknown", "Unknown")
"""Words that tprimat writes for an unknown value."""


def convert_tprimat(tree: Mapping[str, Any]) -> dict[str, Any]:
    """A file of tprimat with its lists as columns, and None where it has a word for an unknown value."""
    known: dict[str, Any] = {key: _drop_unknown(value) for key, value in tree.items()}
    known = {key: value for key, value in known.items() if value is not None}
    times = known.get("raw_step_times") or known.get("step_times") or []
    count = len(times)
    columns: dict[str, Any] = {"number": list(range(1, count + 1)), "time_s": times}
    training = known.get("training_config") or {}
    batch, length = training.get("global_batch_size"), training.get("sequence_length")
    if batch and length:
        columns["tokens"] = [float(batch) * float(length)] * count
    notes = []
    for column, key in (("loss", "loss_values"), ("learning_rate", "learning_rates")):
        values = known.get(key) or []
        if len(values) == count:
            columns[column] = values
        elif values:
            notes.append(f"{key} has {len(values)} values for {count} steps, and is not assigned to steps")
    name = {"amd": "amd", "nvd": "nvidia"}.get(str(known.get("platform")), str(known.get("platform")))
    own = {"schema", "schema_version", "source", "cell", "steps", "state", "notes"}
    return {key: value for key, value in known.items() if key not in own} | {
        "source": "tprimat",
        "step_times": times,
        "steps": columns,
        "cell": {"platform": name},
        "notes": notes,
    }


def _drop_unknown(value: Any) -> Any:
    """`value` with None for words that mean that it is not known, and for numbers that are not finite."""
    if isinstance(value, dict):
        return {key: kept for key, item in value.items() if (kept := _drop_unknown(item)) is not None}
    if isinstance(value, list):
        return [_drop_unknown(item) for item in value]
    is_unknown = value in UNKNOWN_WORDS or (isinstance(value, float) and not math.isfinite(value))
    return None if is_unknown else value
