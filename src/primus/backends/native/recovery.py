"""Recovery from bad steps: a rewind to a good checkpoint, or the end of the run.

The order is a protocol, in which the process may be killed between any two actions: finish the checkpoint in writing,
choose the checkpoint to go back to, write `rewinds.json`, rename the checkpoints of bad steps, load. Every process
makes the same calls: the bad steps are found from values that an all-reduce made equal.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from primus.backends.native import rewind
from primus.backends.native.rewind import Rewind
from primus.backends.native.setup import load_start
from primus.backends.native.training import Training
from primus.checkpoint import folders
from primus.errors import FinalError
from primus.session.bad_steps import BadSteps
from primus.session.resume import ResumePoint
from primus.session.torch_processes import seed_everything


def recover_from_bad_steps(training: Training, bad: BadSteps) -> None:
    """Rewind to the newest checkpoint from before the bad steps, and skip the data up to their end.

    Before the first checkpoint of a run it rewinds to the initial state of the run. Every process must call it.

    Raises:
        FinalError: The policy ends the run, or it cannot be rewound.
    """
    training.attempt.beat("checkpoint", bad.last.step)
    # The checkpoint that is being written may be the one to go back to, or one to rename.
    training.saver.finish_writing()
    limit = training.experiment.trainer.training.max_rewinds
    if bad.answer == "stop" or len(training.rewinds) >= limit:
        # Skipped steps leave good weights; a spike may have changed them before it was detected.
        if bad.is_spike or bad.answer == "rewind":
            _report_set_aside(training, lambda: rewind.set_aside_from(training.search.folder, bad.first))
        raise bad if bad.answer == "stop" else FinalError(f"{bad.problem}; {limit} rewinds have not helped", bad.hint)
    # From here on the order is that of the protocol in the docstring of this module.
    start = _find_good_start(training, bad)
    _record_rewind(training, bad, start)
    _rewind_to_start(training, start)


def _find_good_start(training: Training, bad: BadSteps) -> ResumePoint | None:
    """The checkpoint to go back to; None for the initial weights."""
    # Asked of one process: others may list the folder after it has changed.
    had_any = training.processes.broadcast_from_first(bool(folders.list_checkpoints(training.search.folder)))
    start = training.search.find_start(before=bad.first)
    is_own = start is not None and start.manifest.run == training.attempt.run.id
    # The run had checkpoints, but none from before the bad steps is left: the initial weights would lose all progress.
    if had_any and not is_own:
        _report_set_aside(training, lambda: rewind.set_aside_from(training.search.folder, bad.first))
        raise FinalError(
            f"{bad.problem}; no good checkpoint from before step {bad.first} is left",
            "raise keep_last_n, lower save_interval, and start again or from another run's checkpoint with load:",
        )
    return start


def _record_rewind(training: Training, bad: BadSteps, start: ResumePoint | None) -> None:
    """Record the rewind in the run folder; then rename the checkpoints that it undoes."""
    run = training.attempt.run
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
    training.rewinds.append(rewound)
    if training.processes.is_first:
        rewind.write_rewinds(run, training.rewinds)
    _report_set_aside(training, lambda: rewind.set_aside_undone(training.search.folder, run, training.rewinds))
    training.append_event(
        "rewind",
        from_step=rewound.from_step,
        first_bad_step=rewound.first_bad_step,
        to_step=rewound.to_step,
        skipped_samples=rewound.skipped_samples,
        reason=rewound.reason,
        number=len(training.rewinds),
    )


def _rewind_to_start(training: Training, start: ResumePoint | None) -> None:
    config = training.experiment.trainer.training
    if start is None:
        seed_everything(config.seed, config.deterministic)
    load_start(training, start, training.trainable.model, training.optimizer, training.processes)
    if start is None or start.weights_only:
        # AdamW creates its moments again at the next step, as zeros.
        training.optimizer.state.clear()
    training.step = start.step if start else 0
    training.consumed_samples = start.consumed_samples if start else 0
    # This step is on disk (or is the beginning), so an interrupt now has nothing to save.
    training.saver.last_step = training.step
    training.evaluated_step = training.stop_reason = None
    training.bad_steps.restart_after(training.step, start.recent_losses if start else [])
    if start is None or start.weights_only:
        training.callbacks.restore_state(training.initial_callback_state)
    else:
        training.callbacks.restore_state(start.callback_state)
    # After their state was restored, so that callbacks see the step that they continue from.
    training.callbacks.call("after_rewind", training.step)
    training.attempt.beat("train", training.step)
    rewound = training.rewinds[-1]
    training.print_line(rewound.reason)
    training.print_line(
        f"rewind {len(training.rewinds)} of {config.max_rewinds}: back to step {rewound.to_step};"
        f" samples {rewound.first_sample:,} to {rewound.end_sample - 1:,} are skipped"
    )


def _report_set_aside(training: Training, rename: Callable[[], list[str]]) -> None:
    rewind.set_aside(training.processes, rename, training.attempt.say, training.attempt.event)
