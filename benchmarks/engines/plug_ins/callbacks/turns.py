"""Take the steps of a run of primus in turns with another process."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from primus.callback import Callback

if TYPE_CHECKING:
    from primus.callback import TrainingView


class Turns(Callback):
    """Waits before each step, so that everything that a run adds to a step is in its time."""

    def __init__(self, training: TrainingView) -> None:
        from engines.gate import StepGate

        self._gate, self._training = StepGate(), training

    def before_step(self) -> None:
        """End the run when no more steps are asked for."""
        if not self._gate.wait():
            self._training.request_stop("the measurement is over")


def build(options: Any, training: TrainingView) -> Callback:
    """The callback of the only process."""
    return Turns(training)
