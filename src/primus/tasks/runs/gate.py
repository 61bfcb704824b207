"""Compare the speed and losses of a run with a baseline; exit code 3 if it became slower or the loss differs."""

from __future__ import annotations

import os
from pathlib import Path

from msgspec import Struct

from primus.config.flags import PositionalRun, RunName
from primus.errors import EXIT_OK, EXIT_UNFIT, UsageError
from primus.report import junit, table
from primus.report.junit import CheckResult
from primus.runs import baseline, gate, store, summary
from primus.runs.files import write_text
from primus.runs.gate import CostChange, LossComparison, SpeedComparison
from primus.runs.run_steps import RunSteps, load_run_steps
from primus.runs.store import Run
from primus.task import TaskContext


class Options(Struct, frozen=True, kw_only=True):
    """Options of `runs gate`."""

    run: PositionalRun
    """Run to test: folder, id or its beginning, or name of an experiment (its newest run)."""
    baseline: tuple[RunName, ...] = ()
    """Runs to compare with, or a baseline file. The name of the experiment means its newest earlier run. Three or more
    runs also give the spread between runs."""
    metric: str = "tokens_per_s"
    """Value of the step events to compare: tokens_per_s, step_time_s, memory_gib ..."""
    tolerance: str = "3%"
    """Slowdown that must fail. A change of up to half of it passes."""
    loss_tolerance: str = "1e-3"
    """Largest relative difference of the losses of a step; 0 requires identical bits, `off` compares speed only."""
    strict: bool = False
    """Also fail if the steps are too few or too noisy to decide, or if there is no earlier run."""
    junit: str | None = None
    """File for the result as JUnit XML."""
    save_baseline: str | None = None
    """File to add the run to if it passes; created if needed. It keeps the newest ten runs of each machine class and
    experiment."""
    workspace: str = "./output"
    """Folder that holds all run folders."""


class GateResult(Struct, frozen=True, kw_only=True):
    """The result of the gate."""

    run: str
    machine: str
    baselines: list[str]
    speed: SpeedComparison | None = None
    loss: LossComparison | None = None
    is_passed: bool = True
    differences: list[str] = []
    """What else differs from the newest baseline run."""


def run(options: Options, context: TaskContext) -> int:
    """Print the comparison.

    Raises:
        UsageError: A run, metric or tolerance is wrong, a run is executing or too short, or no baseline has this
            machine class.
        PrimusError: A run failed, or a file is damaged.
    """
    if not options.baseline and not options.save_baseline:
        raise UsageError(
            "runs gate needs --baseline or --save-baseline", "name a run, an experiment or a baseline file"
        )
    tolerance = _parse_tolerance("--tolerance", options.tolerance, least=1e-4)
    judged = store.find_run(options.run, Path(options.workspace))
    steps = load_run_steps(judged)
    result = GateResult(run=judged.id, machine=steps.machine, baselines=[])
    if options.baseline:
        baselines = _find_baselines(options, steps)
        if baselines:
            result = _judge(options, steps, baselines, tolerance)
        else:
            result = GateResult(run=judged.id, machine=steps.machine, baselines=[], is_passed=not options.strict)
    if options.junit:
        write_text(Path(options.junit), junit.format_junit("primus gate", _list_checks(result)))
    lines = [_format_result(result)] if options.baseline else []
    if options.save_baseline and result.is_passed:
        count = baseline.save_baseline(Path(options.save_baseline), steps)
        lines.append(f"{options.save_baseline}: {count} run(s) of {steps.name} on {steps.machine}")
    context.result(result, "\n".join(lines))
    return EXIT_OK if result.is_passed else EXIT_UNFIT


def _judge(options: Options, steps: RunSteps, baselines: list[RunSteps], tolerance: float) -> GateResult:
    speed = gate.compare_speed(steps, baselines, options.metric, tolerance)
    newest = max(baselines, key=lambda each: each.created)
    loss = None
    if options.loss_tolerance != "off":
        loss = gate.compare_losses(steps, newest, _parse_tolerance("--loss-tolerance", options.loss_tolerance, least=0))
    is_slower = speed.verdict == "slower" or (options.strict and speed.verdict == "inconclusive")
    return GateResult(
        run=steps.run,
        machine=steps.machine,
        baselines=[each.run for each in baselines],
        speed=speed,
        loss=loss,
        is_passed=not is_slower and (loss is None or loss.is_equal),
        differences=gate.list_differences(steps, newest),
    )


def _find_baselines(options: Options, steps: RunSteps) -> list[RunSteps]:
    found = [each for name in options.baseline for each in _load_baselines(name, Path(options.workspace), steps)]
    other = next((each for each in found if each.machine != steps.machine), None)
    if other:
        raise UsageError(
            f"run {steps.run} is from another machine class than its baseline {other.run}: {steps.machine}, not"
            f" {other.machine}",
            "choose a baseline of the same machine class; a baseline file keeps several",
        )
    return list({each.run: each for each in found}.values())


def _load_baselines(name: str, workspace: Path, steps: RunSteps) -> list[RunSteps]:
    if os.path.isfile(name):
        return baseline.select_baselines(Path(name), steps)
    earlier = [each for each in store.list_runs(workspace / name) if each.id < steps.run and _is_done(each)]
    if not earlier and name == steps.name and (workspace / name).is_dir():
        return []  # the first run of its experiment, as a job of continuous integration meets it
    found = earlier[-1] if earlier else store.find_run(name, workspace)
    if found.id == steps.run:
        raise UsageError(f"run {steps.run} is its own baseline", "name an earlier run or a baseline file")
    return [load_run_steps(found)]


def _is_done(run: Run) -> bool:
    return store.is_run(run.directory) and summary.find_run_state(run, run.read_metadata()) == "done"


def _parse_tolerance(flag: str, text: str, least: float) -> float:
    """`3%` or `0.03` as a number."""
    try:
        value = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        value = -1.0
    if not least <= value < 1:
        raise UsageError(f"{flag} {text}: not a share from {least:g} to 1", "write 3% or 0.03")
    return value


def _list_checks(result: GateResult) -> list[CheckResult]:
    checks = []
    if result.speed:
        checks.append(
            CheckResult(
                result.speed.metric,
                _format_speed(result.speed),
                is_failed=result.speed.verdict == "slower",
                is_undecided=result.speed.verdict == "inconclusive",
            )
        )
    if result.loss:
        checks.append(CheckResult("loss", _format_loss(result.loss), is_failed=not result.loss.is_equal))
    return checks


def _format_result(result: GateResult) -> str:
    if not result.baselines:
        verdict = "not compared" if result.is_passed else "FAILED: not compared"
        return f"{verdict}: {result.run} is the first run of its experiment; the next one is compared with it"
    lines = [f"{'passed' if result.is_passed else 'FAILED'}: run {result.run} against {', '.join(result.baselines)}"]
    lines += [f"  {check.name}: {check.message}" for check in _list_checks(result)]
    lines.append(f"  machine: {result.machine}")
    lines += [f"  changed: {difference}" for difference in result.differences]
    return "\n".join(lines)


def _format_speed(speed: SpeedComparison) -> str:
    changes = "; ".join(f"{each.of} {_format_change(each)}" for each in speed.changes)
    values = f"{table.format_number(speed.run_value)}, baseline {table.format_number(speed.baseline_value)}"
    steps = f"{speed.num_steps} steady steps after {speed.num_warm_up} of warm-up"
    if speed.detectable:
        steps += f" can show a slowdown of {speed.detectable:.1%}"
    text = f"{speed.verdict} (cost of the {changes}); {values}; {steps}"
    if speed.core_wait:
        text += f"; threads waited {speed.core_wait:.0%} of the time for a core: the machine had other work"
    if speed.wanted_steps:
        text += f"; an answer within {speed.tolerance:.2g} needs about {speed.wanted_steps} steady steps"
    return text if speed.is_steady else f"{text}; the speed still changes in the second half of a run"


def _format_change(change: CostChange) -> str:
    return f"{change.change:+.1%} [{change.low:+.1%}, {change.high:+.1%}]"


def _format_loss(loss: LossComparison) -> str:
    if loss.not_finite:
        return f"not finite at step {loss.not_finite[0]}, where the baseline is"
    if loss.largest == 0:
        return f"equal on all {loss.common_steps} common steps"
    text = f"largest relative difference {loss.largest:.2g} at step {loss.largest_step}, tolerance {loss.tolerance:g}"
    return (
        f"differs from step {loss.first_above} on, {loss.num_above} of {loss.common_steps} steps: {text}"
        if loss.num_above
        else text
    )
