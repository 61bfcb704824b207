"""Reports of rollouts: an event for each step, alarms, and the gate on the difference of generation and training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from primus.callback import Callback, StepReport
from primus.data.instruction.policy_settings import POLICY_FORMULAS
from primus.errors import FinalError
from primus.frameworks.native.engine.reinforcement.policy_loss import SUMS
from primus.frameworks.native.engine.reinforcement.rollouts import RolloutCollector
from primus.runs import events
from primus.session.session import Session

EVENT, ALARM = "rollouts", "rollout_alarm"
WINDOW = 10
"""Steps whose means are compared: the first ones of a run and the newest ones."""
COLLAPSED, GROWN, SPREADLESS = 0.1, 2.0, 0.9
"""Share of the first entropy, multiple of the first length, and share of groups without spread that raise an alarm."""


class RolloutReporter(Callback):
    """Appends an event for the rollouts of each step, raises alarms, and stops a run whose rollouts are not its own.

    Args:
        session: The run.
        rollouts: What the steps were trained on.
    """

    def __init__(self, session: Session, rollouts: RolloutCollector) -> None:
        self._session, self._rollouts = session, rollouts
        self._pending: list[tuple[dict[str, Any], torch.Tensor, torch.Tensor]] = []
        """Of the steps that are not reported yet: on a device, the next step runs when one is reported."""
        self._alarms: set[str] = set()
        """Those that were raised: each once in an attempt."""
        self._history: dict[int, dict[str, Any]] = {}

    def before_train(self) -> None:
        loss = self._rollouts.loss
        formula = POLICY_FORMULAS[loss.kind]
        self._session.reporter.print_line(
            f"loss: {loss.kind}, {formula.formula}, r clipped to [{1 - loss.clip_low:g}, {1 + loss.clip_high:g}],"
            f" kl_beta {loss.kl_beta:g} ({formula.paper})"
        )
        start = self._session.start
        self._history = self._read_history(start.step if start else 0)

    def after_step(self) -> None:
        self._pending.append((self._rollouts.facts, *self._rollouts.loss.take_metrics()))

    def after_rewind(self, step: int) -> None:
        self._pending.clear()
        self._history = self._read_history(step)

    def after_report(self, report: StepReport) -> None:
        facts, sums, largest = self._pending.pop(0)
        facts = {**facts, **self._reduce(sums, largest)}
        self._session.attempt.event(EVENT, step=report.step, **facts)
        scalars = {f"rollouts/{name}": value for name, value in facts.items() if not isinstance(value, dict)}
        scalars |= {f"rewards/{name}": value for name, value in facts["rewards"].items()}
        self._session.reporter.log_scalars(report.step, scalars)
        if report.step == 1 or report.step % self._session.trainer.logging.log_interval == 0:
            self._session.reporter.print_line(format_rollouts(facts))
        self._history[report.step] = facts
        for name, text in find_alarms([self._history[step] for step in sorted(self._history)]).items():
            if name not in self._alarms:
                self._alarms.add(name)
                self._session.attempt.event(ALARM, step=report.step, alarm=name, text=text)
                self._session.reporter.print_line(f"alarm at step {report.step}: {text}")
        self._check_mismatch(report.step, facts)

    def _check_mismatch(self, step: int, facts: Mapping[str, Any]) -> None:
        """Stop before a checkpoint has what was learnt from completions of another distribution.

        Raises:
            FinalError: The limit is exceeded.
        """
        limit = self._rollouts.mismatch_limit
        if not facts["mismatch_kl"] <= limit:  # also where it is not a number
            raise FinalError(
                f"step {step}: the log-probabilities of generation and training differ: KL {facts['mismatch_kl']:.3g},"
                f" rollout_mismatch_limit {limit:g}, largest difference {facts['mismatch_largest']:.3g}",
                "train in a wider format (bf16: false), or raise the limit; the last checkpoint is of an earlier step",
            )

    def _reduce(self, sums: torch.Tensor, largest: torch.Tensor) -> dict[str, float]:
        group = self._rollouts.data_group
        if group is not None:
            dist.all_reduce(sums, group=group)
            dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
        tokens, *others = sums.tolist()
        means = {name: value / max(tokens, 1.0) for name, value in zip(SUMS[1:], others, strict=True)}
        return {**means, "mismatch_largest": largest.item()}

    def _read_history(self, step: int) -> dict[int, dict[str, Any]]:
        recorded = events.read_events(self._session.attempt.run.events)
        return {each["step"]: each for each in recorded if each["kind"] == EVENT and each["step"] <= step}


def find_alarms(history: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """What is wrong with the newest rollouts of a run, by the name of the alarm."""
    first, newest = history[:WINDOW], history[-WINDOW:]
    found = {}
    if len(newest) == WINDOW and min(each["groups_without_spread"] for each in newest) >= SPREADLESS:
        found["no_spread"] = (
            f"for {WINDOW} steps at least {SPREADLESS:.0%} of the prompts had equal rewards, from which nothing is"
            f" learnt; mean reward {_mean(newest, 'reward'):.3f}"
        )
    if len(history) < 2 * WINDOW:
        return found
    for name, key, is_wrong in (
        ("entropy_collapse", "entropy", lambda old, new: new < COLLAPSED * old),
        ("length_growth", "length", lambda old, new: new > GROWN * old),
    ):
        old, new = _mean(first, key), _mean(newest, key)
        if is_wrong(old, new):
            found[name] = f"{key} {new:.4g} in the last {WINDOW} steps, {old:.4g} in the first ones"
    return found


def format_rollouts(facts: Mapping[str, Any]) -> str:
    """The numbers of the rollouts of a step in one line."""
    rewards = ", ".join(f"{name} {value:.3f}" for name, value in facts["rewards"].items())
    return (
        f"  reward {facts['reward']:.3f} ({rewards}), {facts['groups_without_spread']:.0%} of groups without spread,"
        f" {facts['length']:.1f} tokens, {facts['cut']:.0%} cut, entropy {facts['entropy']:.3f}, KL {facts['kl']:.2g},"
        f" mismatch {facts['mismatch_kl']:.1g} (largest {facts['mismatch_largest']:.1g})"
    )


def _mean(history: Sequence[Mapping[str, Any]], key: str) -> float:
    return sum(each[key] for each in history) / len(history)
