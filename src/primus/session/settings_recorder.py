"""The callback that records which settings are in force after the first step."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack

from msgspec import structs

from primus.callback import Callback, StepReport
from primus.config.schedule import compute_learning_rate
from primus.errors import UsageError
from primus.runs.settings_in_force import EVENT
from primus.session.ranks.processes import find_first_problem
from primus.session.session import Session
from primus.session.settings.settings_in_force import (
    SWITCH,
    LiveSettings,
    collect_request,
    format_problem,
    judge_clipping,
    judge_settings,
)


class SettingsRecorder(Callback):
    """A callback that records the settings in force after the first step of an attempt, and ends a run without them.

    Args:
        session: The run.
        watch: Observes the first step from its beginning to its end.
        read: Reads the settings right after it.
    """

    def __init__(
        self, session: Session, watch: AbstractContextManager[object], read: Callable[[], LiveSettings]
    ) -> None:
        self._session, self._watch, self._read = session, watch, read
        self._watching = ExitStack()
        self._live: LiveSettings | None = None
        self._is_begun = self._is_judged = False

    def before_step(self) -> None:
        if not self._is_begun:
            self._is_begun = True
            self._watching.enter_context(self._watch)

    def after_step(self) -> None:
        if self._live is None:
            self._watching.close()
            self._live = self._read()

    def after_report(self, report: StepReport) -> None:
        if self._is_judged or self._live is None:
            return
        self._is_judged = True
        session = self._session
        request = collect_request(session.trainer)
        if session.trainer.optimizer.schedule == "primus":
            request["learning_rate"] = compute_learning_rate(
                report.step, session.trainer.optimizer, session.trainer.training.train_iters
            )
        live = [*self._live, *judge_clipping(self._live, session.trainer.optimizer.clip_grad, report)]
        found = judge_settings(list({each.key: each for each in live}.values()), request)
        session.reporter.append_event(EVENT, step=report.step, settings=[structs.asdict(each) for each in found])
        own = format_problem(found, session.engine.library, session.engine.version)
        problem = find_first_problem(session.processes.all_gather_values(own))
        if not problem:
            return
        if session.trainer.training.allow_settings_not_in_force:
            session.reporter.print_line(f"note: {problem}")
            return
        raise UsageError(problem, f"change what is asked for, or train with what is in force: --{SWITCH} true")

    def close(self) -> None:
        self._watching.close()
