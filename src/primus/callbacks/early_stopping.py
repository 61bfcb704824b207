"""End training when the validation loss has stopped improving."""

from __future__ import annotations

import math
from typing import Annotated, Any

from msgspec import Meta, Struct

from primus.callback import Callback, EvaluationReport, TrainingView


class Options(Struct, frozen=True, kw_only=True):
    """Options of `early_stopping`."""

    patience: Annotated[int, Meta(ge=1)] = 3
    """Evaluations in a row without an improvement after which training ends."""
    min_delta: Annotated[float, Meta(ge=0)] = 0.0
    """A loss counts as an improvement if it is lower than the best one by more than this."""


class EarlyStopping(Callback):
    """Compares each validation loss with the best one; set `eval_interval` for it to see any."""

    def __init__(self, options: Options, training: TrainingView) -> None:
        self._options, self._training = options, training
        self._best: float | None = None
        self._num_worse = 0

    def after_evaluation(self, report: EvaluationReport) -> None:
        if report.data != "validation":
            return
        # Every process has the same loss, so all of them count alike.
        best = math.inf if self._best is None else self._best
        if report.loss < best - self._options.min_delta:
            self._best, self._num_worse = report.loss, 0
            return
        self._num_worse += 1
        if self._num_worse >= self._options.patience:
            self._training.request_stop(
                f"the validation loss has not improved on {best:.4f} in {self._num_worse} evaluations"
            )

    def state_dict(self) -> dict[str, Any]:
        return {"best": self._best, "num_worse": self._num_worse}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._best, self._num_worse = state["best"], state["num_worse"]


def build(options: Options, training: TrainingView) -> EarlyStopping:
    """The callback for one process."""
    return EarlyStopping(options, training)
