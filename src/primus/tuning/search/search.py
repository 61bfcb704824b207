"""What the tasks of `tune` share: trials as runs of `train pretrain`, one after the other, and their report."""

from __future__ import annotations

import shlex
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from msgspec import Struct, structs

from primus import experiment
from primus.config.load import Resolved
from primus.errors import PrimusError, UsageError
from primus.report import table
from primus.runs.files import to_json, write_text
from primus.runs.gate import CONTENDED
from primus.task import TaskContext
from primus.tuning.search import experiment_patch
from primus.tuning.search.grid import Settings, list_combinations, parse_keys
from primus.tuning.search.halving import search_best
from primus.tuning.search.ranking import Predict, RankedCandidate, rank_candidates
from primus.tuning.search.study import Study, StudyRecord, open_study
from primus.tuning.search.training import QUIET, TrialTraining, run_training
from primus.tuning.search.trial import LOSS, TrialResult, measure_run

AS_WRITTEN = "as written"
POLL_S = 1.0
"""Time between two looks for the results of other processes."""
LONGEST_VALUE = 32
"""Maximum characters of a setting in a line of a table."""
MOST_LISTED = 20


class SearchRequest(Struct, frozen=True, kw_only=True):
    """A search."""

    config: str
    keys: tuple[str, ...]
    metric: str
    rungs: list[int]
    """Steps of the trials of each rung."""
    workspace: str
    timeout_s: float
    options: tuple[str, ...] = ()
    """Further options of `direct` for all trials."""
    predict: Predict | None = None
    """Predicts candidates, which are tried in this order; those that cannot win are not. None: in that of the keys."""


class SearchResult(Struct, frozen=True, kw_only=True):
    """The result of a search."""

    study: str
    metric: str
    best: TrialResult | None
    as_written: TrialResult | None
    """The experiment without changes, at the steps of the last rung."""
    is_better: bool
    """Whether the best is better than the experiment as written beyond the noise."""
    patch: str | None = None
    """File with the patch, if the best is better and the file has a block `overrides:`."""
    gain: float | None = None
    """Relative gain of the best over the experiment as written."""
    steps: int
    """Steps of all trials."""
    share_of_grid: float
    """Share of the steps that every combination would take in the last rung."""
    ranking: list[RankedCandidate] = []
    """All candidates with their predictions, in the order in which they were tried."""
    trials: list[TrialResult]


def run_search(request: SearchRequest, context: TaskContext) -> SearchResult:
    """Search the combinations of the keys; prints a line for each trial.

    Raises:
        UsageError: The experiment or a key is invalid, several nodes are used, or the search is running already.
        PrimusError: No trial gave a result.
    """
    if context.layout is not None and context.layout.nnodes > 1:
        raise UsageError("tune runs trials on one node", "start it without --nnodes")
    keys = parse_keys(request.keys)
    # The shortest trials first: a schedule may need more steps than they have.
    base = [_resolve(request, context, {}, steps) for steps in (request.rungs[0], request.rungs[-1])][-1]
    for key, values in keys.items():
        _check_key(request, context, key, values)
    ranking = _rank_candidates(request, context)
    candidates = [each.settings for each in ranking if not each.excluded]
    record = StudyRecord(config=request.config, keys=keys, metric=request.metric)
    with open_study(
        Path(request.workspace),
        base.experiment.exp_name,
        record,
        to_json(base.experiment),
        shares_host=request.metric == LOSS,
    ) as study:
        context.say(f"study: {study.folder}; {len(candidates)} candidates, {request.metric}")
        for each in ranking:
            if each.excluded:
                context.say(f"  {_format_ranked(each)}")
        best_first = search_best(candidates, request.rungs, partial(_measure_all, request, context, study))
        return _summarize(request, study, best_first, ranking)


def list_plan_notes(request: SearchRequest, context: TaskContext) -> list[str]:
    """What a dry run prints: the trials of a search.

    Raises:
        UsageError: The experiment or a key is invalid.
    """
    keys = parse_keys(request.keys)
    resolved = _resolve(request, context, {}, request.rungs[-1])
    for key, values in keys.items():
        _check_key(request, context, key, values)
    candidates = _rank_candidates(request, context)
    steps = " then ".join(map(str, request.rungs))
    lines = [f"{len(candidates)} candidates for {resolved.experiment.exp_name}, by {request.metric}, {steps} steps"]
    lines += [f"  {_format_ranked(each)}" for each in candidates[:MOST_LISTED]]
    return lines + ([f"  and {len(candidates) - MOST_LISTED} more"] if len(candidates) > MOST_LISTED else [])


def format_search_result(result: SearchResult) -> str:
    """The last trials as a table, and what to do."""
    trials = sorted(result.trials, key=lambda trial: (-trial.steps, trial.rank))
    rows = [
        [
            _format_briefly(trial.settings),
            str(trial.steps),
            table.format_number(trial.value),
            trial.state,
            trial.reason[:60],
        ]
        for trial in trials[:MOST_LISTED]
    ]
    lines = [table.format_table(["settings", "steps", result.metric, "state", ""], rows, right=(1, 2))]
    if len(trials) > MOST_LISTED:
        lines.append(f"and {len(trials) - MOST_LISTED} more trials in {result.study}/study.json")
    lines.append(f"{result.steps} steps, {result.share_of_grid:.0%} of the whole grid")
    waits = [trial.core_wait or 0.0 for trial in (result.best, result.as_written) if trial is not None]
    if max(waits, default=0.0) > CONTENDED:
        lines.append(
            f"not steady: threads waited up to {max(waits):.0%} of the time for a core, because the machine had other"
            " work: search again on an idle machine"
        )
    if result.best is None or not result.is_better:
        return "\n".join([*lines, "no setting is better than the experiment as written, beyond the noise"])
    gain = f"{result.gain:+.1%}" if result.gain is not None else "the experiment as written gives no result"
    words = _format_settings(result.best.settings)
    lines.append(f"best: {words} ({gain})")
    lines.append(f"apply it: patch -p1 < {result.patch}" if result.patch else f"apply it: add to the command: {words}")
    return "\n".join(lines)


def _resolve(request: SearchRequest, context: TaskContext, settings: Settings, steps: int) -> Resolved:
    words = [f"{key}={value}" for key, value in {**QUIET, **settings}.items()]
    words.append(f"train_iters={steps}")
    return experiment.resolve_experiment(Path(request.config), [*context.overrides, *words], context.environ)


def _list_different_candidates(request: SearchRequest, context: TaskContext) -> list[Settings]:
    """The candidates without those that train the same as an earlier one, such as the experiment as written."""
    found: dict[str, Settings] = {}
    for number, settings in enumerate([{}, *list_combinations(parse_keys(request.keys))]):
        try:
            content = to_json(_resolve(request, context, settings, request.rungs[-1]).experiment)
        except UsageError:  # its trial fails with the reason
            content = str(number)
        found.setdefault(content, settings)
    return list(found.values())


def _rank_candidates(request: SearchRequest, context: TaskContext) -> list[RankedCandidate]:
    steps = request.rungs[-1]
    candidates = _list_different_candidates(request, context)
    return rank_candidates(candidates, lambda settings: _resolve(request, context, settings, steps), request.predict)


def _format_ranked(each: RankedCandidate) -> str:
    words = _format_briefly(each.settings)
    if each.prediction is not None:
        words += f": {each.prediction.format_figures()}"
    return f"{words}; not tried, {each.excluded}" if each.excluded else words


def _check_key(request: SearchRequest, context: TaskContext, key: str, values: Sequence[str]) -> None:
    """Check that some value of a key is valid: a misspelled key has none."""
    errors = []
    for value in values:
        try:
            _resolve(request, context, {key: value}, request.rungs[-1])
        except UsageError as error:
            errors.append(error)
    if len(errors) == len(values):
        raise errors[0]


def _measure_all(
    request: SearchRequest, context: TaskContext, study: Study, candidates: Sequence[Settings], steps: int
) -> list[TrialResult]:
    """The results of all candidates; those that another process executes are waited for."""
    results: dict[int, TrialResult] = {}
    is_waiting = False
    while len(results) < len(candidates):
        before = len(results)
        for index, settings in enumerate(candidates):
            if index not in results:
                result = _measure(request, context, study, settings, steps)
                results |= {index: result} if result else {}
        if len(results) == before:
            if not is_waiting:
                context.say(f"  waiting for {len(candidates) - before} trials of other processes")
            # A claim ends with its process: the trial of one that was killed is free in a later round, and is run here.
            is_waiting = True
            time.sleep(POLL_S)
    return [results[index] for index in range(len(candidates))]


def _measure(
    request: SearchRequest, context: TaskContext, study: Study, settings: Settings, steps: int
) -> TrialResult | None:
    """The result of a trial; None if another process executes it."""
    known = study.find_result(settings, steps)
    if known is not None:
        return known
    with study.claim_trial(settings, steps) as is_ours:
        if not is_ours:
            return None
        known = study.find_result(settings, steps)  # which its holder may have written before it released the claim
        if known is not None:
            return known
        result = _run_trial(request, context, study, dict(settings), steps)
        study.add_result(result)
    value = table.format_number(result.value) if result.state == "done" else f"{result.state}: {result.reason}"
    context.say(f"  {_format_briefly(settings)}, {steps} steps: {value}")
    return result


def _run_trial(
    request: SearchRequest, context: TaskContext, study: Study, settings: dict[str, str], steps: int
) -> TrialResult:
    try:
        _resolve(request, context, settings, steps)
    except UsageError as error:
        return TrialResult(settings=settings, steps=steps, state="refused", reason=error.problem)
    answer, run = run_training(
        TrialTraining(
            config=request.config,
            settings={**settings, "train_iters": str(steps)},
            # A separate folder: other processes of the study create runs at the same time.
            workspace=study.find_trial_folder(settings, steps),
            limit_s=request.timeout_s,
            options=request.options,
        ),
        context,
        # A variable of the shell would win over that of the trial.
        environ={name: value for name, value in context.environ.items() if f"env.{name}" not in settings},
    )
    if answer.state == "slow":
        return TrialResult(settings=settings, steps=steps, state="timed out", reason=f"after {request.timeout_s:g} s")
    if run is None:
        return TrialResult(settings=settings, steps=steps, state="failed", reason=answer.problem)
    result = measure_run(run, settings, steps, request.metric)
    return structs.replace(result, run=str(run.directory.relative_to(study.folder)))


def _summarize(
    request: SearchRequest, study: Study, best_first: Sequence[TrialResult], ranking: list[RankedCandidate]
) -> SearchResult:
    trials = study.record.trials
    done = [trial for trial in best_first if trial.state == "done"]
    if not done:
        states = sorted({f"{trial.state}: {trial.reason}" for trial in trials})
        raise PrimusError(f"no trial of {study.folder} succeeded", "; ".join(states[:3]))
    base = next((trial for trial in best_first if not trial.settings), None)
    best = done[0]
    is_better = bool(best.settings) and (base is None or best.is_better(base))
    steps = sum(trial.steps for trial in trials if trial.state == "done")
    return SearchResult(
        study=str(study.folder),
        metric=request.metric,
        best=best,
        as_written=base,
        is_better=is_better,
        patch=_write_patch(request, study, best.settings) if is_better else None,
        gain=base.cost / best.cost - 1 if base and base.cost and best.cost else None,
        steps=steps,
        share_of_grid=steps / (len(ranking) * request.rungs[-1]),
        ranking=ranking,
        trials=trials,
    )


def _write_patch(request: SearchRequest, study: Study, settings: Settings) -> str | None:
    text = Path(request.config).read_text(encoding="utf-8")
    patch = experiment_patch.format_experiment_patch(request.config, text, settings)
    if not patch:
        return None
    path = study.folder / "best.patch"
    write_text(path, patch)
    return str(path)


def _format_settings(settings: Settings) -> str:
    return " ".join(f"{key}={shlex.quote(value)}" for key, value in settings.items()) or AS_WRITTEN


def _format_briefly(settings: Settings) -> str:
    """Settings for a line of a table: long values, such as the options of an allocator, are cut."""
    return _format_settings(
        {
            key: value if len(value) <= LONGEST_VALUE else f"{value[:LONGEST_VALUE]}..."
            for key, value in settings.items()
        }
    )
