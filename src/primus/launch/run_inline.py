"""Run a task that needs no workers in this process, with its hooks and patches around it."""

from __future__ import annotations

import signal
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from primus.errors import EXIT_FAILED, PrimusError
from primus.launch.hooks import runner
from primus.launch.hooks.runner import HookContextFacts, HookResult
from primus.launch.plan import Action
from primus.launch.request import LaunchRequest
from primus.launch.signals import find_exit_code, raise_on_signals
from primus.machine.cluster import ClusterLayout
from primus.runs.store import RunOutcome


def run_inline(
    planned: Sequence[Action],
    request: LaunchRequest,
    layout: ClusterLayout,
    python: str,
    environ: Mapping[str, str],
    accept: Callable[[HookResult], Sequence[str]],
    task: Callable[[], int],
    say: Callable[[str], None],
) -> int:
    """Perform what comes before, the task, and what comes after; gives the task's exit code.

    Args:
        planned: Hooks and patches.
        request: What was asked.
        layout: Where this node stands.
        python: Interpreter of Python hooks.
        environ: This process's variables, a live view.
        accept: Takes what a hook wants set; gives what it has to say about that.
        task: The task itself.
        say: Tells people what is done.

    Raises:
        PrimusError: A hook or patch has failed, or the task.
    """
    outcome = RunOutcome(state="failed", exit_code=EXIT_FAILED, reason="an error in primus itself")
    with tempfile.TemporaryDirectory(prefix="primus-hooks-") as logs:
        scene = HookContextFacts(
            task=request.task,
            words=request.words,
            layout=layout,
            python=python,
            logs=Path(logs),
            say=say,
        )
        try:
            runner.run_before_hooks(planned, scene, lambda: environ, accept)
            with raise_on_signals():
                code = task()
            outcome = RunOutcome(state="failed" if code else "done", exit_code=code)
        except PrimusError as error:
            outcome = runner.outcome_of(error)
            raise
        except KeyboardInterrupt as error:
            code = find_exit_code(error)
            outcome = RunOutcome(state="interrupted", exit_code=code, reason=signal.Signals(code - 128).name)
            raise
        finally:
            runner.run_after_hooks(planned, scene, environ, outcome)
    return code
