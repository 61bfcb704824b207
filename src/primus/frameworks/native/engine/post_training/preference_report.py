"""Reports of what training on preferences has learnt: margins, accuracy and rewards of the pairs of each step."""

from __future__ import annotations

import torch
import torch.distributed as dist

from primus.callback import Callback, EvaluationReport, StepReport
from primus.data.instruction.preference_settings import FORMULAS
from primus.frameworks.native.engine.model import Transformer
from primus.frameworks.native.engine.post_training.preferences import METRICS, PreferenceLoss
from primus.session.session import Session

EVENT = "preferences"


class PreferenceReporter(Callback):
    """Appends an event for the pairs of each step, and of each evaluation.

    Args:
        session: The run.
        model: That is trained.
        objective: Its loss.
    """

    def __init__(self, session: Session, model: Transformer, objective: PreferenceLoss) -> None:
        self._session, self._group, self._objective = session, model.layout.data.group, objective
        self._pending: list[torch.Tensor] = []
        """Sums of the steps that are not reported yet: on a device, the next step runs when one is reported."""

    def before_train(self) -> None:
        objective = self._objective
        formula = FORMULAS[objective.kind]
        self._session.reporter.print_line(
            f"loss: {objective.kind}, {formula.formula}, beta {objective.beta} ({formula.paper})"
        )

    def after_step(self) -> None:
        self._pending.append(self._objective.take_metrics())

    def after_rewind(self, step: int) -> None:
        self._pending.clear()

    def after_report(self, report: StepReport) -> None:
        means = self._reduce(self._pending.pop(0))
        self._session.attempt.event(EVENT, data="training", step=report.step, **means)
        self._session.reporter.log_scalars(report.step, {f"preferences/{name}": value for name, value in means.items()})

    def before_evaluation(self) -> None:
        self._objective.take_metrics()

    def after_evaluation(self, report: EvaluationReport) -> None:
        means = self._reduce(self._objective.take_metrics())
        self._session.attempt.event(EVENT, data=report.data, step=report.step, **means)
        self._session.reporter.print_line(
            f"{report.data} at step {report.step}: {means['accuracy']:.1%} of the pairs have the chosen answer first,"
            f" margin {means['margin']:.4f}"
        )

    def _reduce(self, sums: torch.Tensor) -> dict[str, float]:
        if self._group is not None:
            dist.all_reduce(sums, group=self._group)
        *values, count = sums.tolist()
        return {name: value / count for name, value in zip(METRICS, values, strict=True)}
