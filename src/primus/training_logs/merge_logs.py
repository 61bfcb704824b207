"""One log from the files of several ranks and attempts of a run."""

from __future__ import annotations

import math
from collections.abc import Sequence

from primus.errors import UsageError
from primus.training_logs.find_logs import LogGroup
from primus.training_logs.log_step import OF_ALL_RANKS
from primus.training_logs.read_log import AUTO, MAX_EVALUATIONS, MAX_EXAMPLES, TrainingLog, read_log


def read_log_group(group: LogGroup, name: str = AUTO) -> TrainingLog:
    """The log of a run; files without steps are skipped if another one has steps.

    Raises:
        UsageError: No file has steps.
    """
    attempts: dict[int, TrainingLog] = {}
    failure: UsageError | None = None
    num_ranks = 0
    for file in group.files:
        try:
            log = read_log(file.path, name)
        except UsageError as error:
            failure = failure or error
            continue
        num_ranks += file.rank is not None and file.attempt == min(attempts, default=file.attempt)
        before = attempts.get(file.attempt)
        attempts[file.attempt] = log if before is None else _merge_ranks(before, log)
    if not attempts:
        assert failure is not None, "a group has files"
        raise (
            failure
            if len(group.files) == 1
            else UsageError(f"{group.name}: none of the {len(group.files)} files has steps", failure.problem)
        )
    merged = _join_attempts([attempts[number] for number in sorted(attempts)])
    merged.path = group.name
    merged.num_ranks = max(merged.num_ranks, num_ranks)
    return merged


def _merge_ranks(a: TrainingLog, b: TrainingLog) -> TrainingLog:
    """The log with more losses, with the most memory of both."""
    main, other = (a, b) if len(a.steps.list_finite("loss")) >= len(b.steps.list_finite("loss")) else (b, a)
    places = {step: place for place, step in enumerate(main.steps.columns["step"])}
    column = main.steps.columns.get(OF_ALL_RANKS)
    if column is not None and OF_ALL_RANKS in other.steps.columns:
        for step, value in zip(other.steps.columns["step"], other.steps.columns[OF_ALL_RANKS], strict=True):
            place = places.get(step)
            if place is not None and not value <= column[place]:
                column[place] = value if math.isnan(column[place]) else max(value, column[place])
    _add_counts(main, other)
    main.num_repeated += len(other.steps)
    main.evaluations = main.evaluations or other.evaluations
    main.settings = other.settings | main.settings
    return main


def _join_attempts(logs: Sequence[TrainingLog]) -> TrainingLog:
    """Attempts one after the other; steps that a later one repeats are discarded."""
    first, *others = logs
    for log in others:
        if not len(log.steps):
            continue
        first.steps.truncate(log.steps.columns["step"][0])
        first.steps.extend(log.steps.columns)
        first.attempts += log.attempts
        first.evaluations = [*first.evaluations, *log.evaluations][:MAX_EVALUATIONS]
        first.settings |= log.settings
        first.num_nonfinite_losses += log.num_nonfinite_losses
        first.num_ranks = max(first.num_ranks, log.num_ranks)
        _add_counts(first, log)
    return first


def _add_counts(main: TrainingLog, other: TrainingLog) -> None:
    main.num_bytes += other.num_bytes
    main.num_lines += other.num_lines
    main.num_unread += other.num_unread
    main.unread = [*main.unread, *other.unread][:MAX_EXAMPLES]
    main.has_derived_times = main.has_derived_times or other.has_derived_times
