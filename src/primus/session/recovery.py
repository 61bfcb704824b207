"""Recovery from bad steps: a rewind to a good checkpoint, or the end of the run.

The order is a protocol, in which the process may be killed between any two actions: finish the checkpoint in writing,
choose the checkpoint to go back to, write `rewinds.json`, rename the checkpoints of bad steps, load. Every process
makes the same calls: the bad steps are found from values that an all-reduce made equal.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from primus.checkpoint import folders
from primus.errors import FinalError
from primus.session.bad_steps import BadSteps
from primus.session.checkpoints import rewind
from primus.session.checkpoints.resume import ResumePoint
from primus.session.checkpoints.rewind import Rewind
from primus.session.training_run import TrainingRun


def recover_from_bad_steps(run: TrainingRun, bad: BadSteps) -> None:
    """Rewind to the newest checkpoint from before the bad steps, and skip the data up to their end.

    Before the first checkpoint of a run it rewinds to the initial state of the run. Every process must call it.

    Raises:
        FinalError: The policy ends the run, or it cannot be rewound.
    """
    run.attempt.beat("checkpoint", bad.last.step)
    # The checkpoint that is being written may be the one to go back to, or one to rename.
    run.saver.finish_writing()
    limit = run.trainer.training.max_rewinds
    if bad.answer == "stop" or len(run.rewinds) >= limit:
        # Skipped steps leave good weights; a spike may have changed them before it was detected.
        if bad.is_spike or bad.answer == "rewind":
            _report_set_aside(run, lambda: rewind.set_aside_from(run.session.search.folder, bad.first))
        raise bad if bad.answer == "stop" else FinalError(f"{bad.problem}; {limit} rewinds have not helped", bad.hint)
    # From here on the order is that of the protocol in the docstring of this module.
    start = _find_good_start(run, bad)
    _record_rewind(run, bad, start)
    _rewind_to_start(run, start)


def _find_good_start(run: TrainingRun, bad: BadSteps) -> ResumePoint | None:
    """The checkpoint to go back to; None for the initial weights."""
    # Asked of one process: others may list the folder after it has changed.
    had_any = run.processes.broadcast_from_first(bool(folders.list_checkpoints(run.session.search.folder)))
    start = run.session.search.find_start(before=bad.first)
    is_own = start is not None and start.manifest.run == run.attempt.run.id
    # The run had checkpoints, but none from before the bad steps is left: the initial weights would lose all progress.
    if had_any and not is_own:
        _report_set_aside(run, lambda: rewind.set_aside_from(run.session.search.folder, bad.first))
        raise FinalError(
            f"{bad.problem}; no good checkpoint from before step {bad.first} is left",
            "raise keep_last_n, lower save_interval, and start again or from another run's checkpoint with load:",
        )
    return start


def _record_rewind(run: TrainingRun, bad: BadSteps, start: ResumePoint | None) -> None:
    """Record the rewind in the run folder; then rename the checkpoints that it undoes."""
    rewound = Rewind(
        time=time.time(),
        from_step=bad.last.step,
        first_bad_step=bad.first,
        to_step=start.step if start else 0,
        first_sample=start.consumed_samples if start else 0,
        end_sample=bad.last.consumed_samples,
        reason=bad.problem,
    )
    # The order matters if the process is killed: after the file, a resumed run skips the data and renames.
    folder = run.session.search.folder
    run.rewinds.append(rewound)
    if run.processes.is_first:
        rewind.write_rewinds(run.attempt.run, run.rewinds)
    _report_set_aside(run, lambda: rewind.set_aside_undone(folder, run.attempt.run, run.rewinds))
    run.append_event(
        "rewind",
        from_step=rewound.from_step,
        first_bad_step=rewound.first_bad_step,
        to_step=rewound.to_step,
        skipped_samples=rewound.skipped_samples,
        reason=rewound.reason,
        number=len(run.rewinds),
    )


def _rewind_to_start(run: TrainingRun, start: ResumePoint | None) -> None:
    run.continue_from(start)
    # Of the beginning also where that has the weights of another run.
    state = start.callback_state if start and not start.weights_only else run.initial_callback_state
    run.callbacks.restore_state(state)
    # After their state was restored, so that callbacks see the step that they continue from.
    run.callbacks.call("after_rewind", run.step)
    run.attempt.beat("train", run.step)
    rewound = run.rewinds[-1]
    run.print_line(rewound.reason)
    run.print_line(
        f"rewind {len(run.rewinds)} of {run.trainer.training.max_rewinds}: back to step {rewound.to_step};"
        f" samples {rewound.first_sample:,} to {rewound.end_sample - 1:,} are skipped"
    )


def _report_set_aside(run: TrainingRun, rename: Callable[[], list[str]]) -> None:
    rewind.set_aside(run.processes, rename, run.attempt.say, run.attempt.event)
