"""Values of the steps of a log, in columns of bounded size."""

from __future__ import annotations

import math
from array import array
from bisect import bisect_left
from collections.abc import Mapping, Sequence

FIELDS = (
    "step",
    "loss",
    "grad_norm",
    "learning_rate",
    "step_time_s",
    "tokens_per_s_per_device",
    "tflops_per_device",
    "mfu",
    "memory_gib",
    "consumed_samples",
    "consumed_tokens",
    "global_batch_size",
    "samples_per_s",
    "num_skipped",
    "energy_j_per_device",
    "load_balancing_loss",
    "router_z_loss",
    "mtp_loss",
)
"""Values that a log may have for a step. A rate is that of all devices, unless its name says otherwise. The loss is
that of the next token, where a log has it apart from the losses of the router and of multi-token prediction."""
MAX_STEPS = 1 << 18
"""Most steps that are kept; of a longer log every second one, every fourth, and so on, so that memory is bounded."""


class StepTable:
    """Rows in order of their step; a column exists if a row has its value, which is NaN in the others."""

    def __init__(self, max_steps: int = MAX_STEPS) -> None:
        self.columns: dict[str, array[float]] = {"step": array("d")}
        self.stride = 1
        """One of how many steps is kept."""
        self.num_added = 0
        self._max_steps = max_steps

    def __len__(self) -> int:
        return len(self.columns["step"])

    def append(self, values: Mapping[str, float]) -> None:
        """Add a row; its step is greater than all others."""
        self.extend({name: (value,) for name, value in values.items()})

    def extend(self, columns: Mapping[str, Sequence[float]]) -> None:
        """Add rows by column; their steps increase, and are greater than all others."""
        first, count = self.num_added, len(columns["step"])
        self.num_added += count
        # Rows are kept by their number, not by their step: a log may hold each tenth step only.
        skipped = -first % self.stride
        size = len(self)
        for name, values in columns.items():
            if name not in self.columns:
                self.columns[name] = array("d", [math.nan]) * size
            kept = values[skipped :: self.stride] if self.stride > 1 else values
            self.columns[name].extend(array("d", kept))
        for name, column in self.columns.items():
            if name not in columns:
                column.extend([math.nan] * (len(self) - len(column)))
        while len(self) > self._max_steps:
            for column in self.columns.values():
                del column[1::2]
            self.stride *= 2

    def truncate(self, step: float) -> None:
        """Remove the rows of `step` and later ones."""
        place = bisect_left(self.columns["step"], step)
        if place < len(self):
            self.num_added = place * self.stride
            for column in self.columns.values():
                del column[place:]

    def scale(self, name: str, factor: float, offset: float = 0.0) -> None:
        """Multiply a column, if it exists, and add a number."""
        if name in self.columns:
            self.columns[name] = array("d", [value * factor + offset for value in self.columns[name]])

    def list_values(self, name: str) -> list[float | None]:
        """A column; None for a value that is missing or is not a finite number."""
        column = self.columns.get(name)
        if column is None:
            return []
        if math.isfinite(sum(column)):
            return list(column)
        return [value if math.isfinite(value) else None for value in column]

    def list_finite(self, name: str) -> list[float]:
        """The finite values of a column."""
        column = self.columns.get(name, ())
        return list(column) if math.isfinite(sum(column)) else [value for value in column if math.isfinite(value)]
