"""Print the mean loss of every N steps, and keep its sum across restarts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from msgspec import Struct

from primus.callback import Callback

if TYPE_CHECKING:
    from primus.callback import StepReport, TrainingView


class Options(Struct, frozen=True, kw_only=True):
    """Options of `plateau`."""

    interval: int = 100
    """Steps in one mean."""


class Plateau(Callback):
    """Adds up the losses of finished steps."""

    def __init__(self, options: Options, training: TrainingView) -> None:
        self.interval, self.training = options.interval, training
        self.total, self.count = 0.0, 0

    def after_report(self, report: StepReport) -> None:
        """Print the mean when enough steps are counted."""
        self.total, self.count = self.total + report.loss, self.count + 1
        if self.count == self.interval:
            self.training.print_line(f"mean loss of steps up to {report.step}: {self.total / self.count:.4f}")
            self.total, self.count = 0.0, 0

    def state_dict(self) -> dict[str, Any]:
        """The sum, for the checkpoint."""
        return {"total": self.total, "count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue the sum."""
        self.total, self.count = state["total"], state["count"]


def build(options: Options, training: TrainingView) -> Callback:
    """The callback of one process."""
    return Plateau(options, training)
