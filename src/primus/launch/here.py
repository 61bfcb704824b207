"""Run a task that needs no workers in this process, with its hooks and patches around it."""

from __future__ import annotations

import signal
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from primus.errors import EXIT_FAILED, PrimusError
from primus.launch import actions
from primus.launch.actions import Given, Scene
from primus.launch.plan import Action
from primus.launch.request import Request
from primus.launch.signals import exit_code_of, raising
from primus.machine.cluster import Layout
from primus.runs.store import Outcome


def perform(
    planned: Sequence[Action],
    request: Request,
    layout: Layout,
    python: str,
    environ: Mapping[str, str],
    accept: Callable[[Given], Sequence[str]],
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
    outcome = Outcome(state="failed", exit_code=EXIT_FAILED, reason="an error in primus itself")
    with tempfile.TemporaryDirectory(prefix="primus-hooks-") as logs:
        scene = Scene(
            task=request.task,
            words=request.words,
            layout=layout,
            python=python,
            logs=Path(logs),
            say=say,
        )
        try:
            actions.before(planned, scene, lambda: environ, accept)
            with raising():
                code = task()
            outcome = Outcome(state="failed" if code else "done", exit_code=code)
        except PrimusError as error:
            outcome = actions.outcome_of(error)
            raise
        except KeyboardInterrupt as error:
            code = exit_code_of(error)
            outcome = Outcome(state="interrupted", exit_code=code, reason=signal.Signals(code - 128).name)
            raise
        finally:
            actions.afterwards(planned, scene, environ, outcome)
    return code
