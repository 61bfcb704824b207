"""Train the first steps of an experiment on several engines, and compare losses, gradient norms and tokens."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from msgspec import Struct

from primus.comparison.engines.engine_runs import FLOAT64, take_float64_steps, take_steps
from primus.comparison.engines.parity import (
    BFLOAT16,
    FLOAT32,
    EngineParity,
    EngineSteps,
    ParityTolerance,
    compare_steps,
)
from primus.comparison.engines.picture import draw_parity
from primus.config.schedule import find_decay_end
from primus.config.schema import Trainer
from primus.config.source import format_yaml_value
from primus.engine_keys import KeyDifference
from primus.errors import EXIT_FAILED, EXIT_OK, EXIT_UNFIT, UsageError
from primus.experiment import resolve_settings
from primus.report import page, table
from primus.report.charts import select_wide
from primus.runs import store
from primus.runs.files import to_json, write_text
from primus.task import TaskContext

OVERRIDES = True

DEFAULT_ENGINES = "native,torchtitan,megatron,jax,huggingface"
EVERY_RUN = (
    *("--eval_interval", "null", "--eval_iters", "0", "--sample_tokens", "0"),
    *("--auto_continue_train", "false", "--disable_last_saving", "true"),
)
"""Settings of the runs, over those of the experiment: only the steps count."""


class Options(Struct, frozen=True, kw_only=True):
    """Options of `compare engines`."""

    config: str
    """Experiment file."""
    engines: str = DEFAULT_ENGINES
    """Engines, separated by commas; the first one that trains is the reference while all agree."""
    steps: int = 20
    """Optimizer steps of each engine."""
    tolerance: float | None = None
    """Largest difference of a loss; 5e-5 in fp32, 5e-2 in bf16."""
    output: str | None = None
    """Folder of comparison.json, comparison.svg and comparison.html; in `comparisons` of the workspace when omitted."""


class EngineComparison(Struct, frozen=True, kw_only=True):
    """The result of `compare engines`."""

    reference: str | None
    """What the engines are compared with: the first one that trained or, where they disagree, native in float64; None
    if none took a step."""
    tolerance: ParityTolerance
    reference_steps: EngineSteps | None
    engines: list[EngineParity]
    output: str
    float64_problem: str = ""
    """Why native in float64 cannot judge engines that disagree, for example because it does not support the model."""


def run(options: Options, context: TaskContext) -> int:
    """Train on each engine, one after the other, and print the comparison.

    Where engines disagree, native trains in float64, and all are compared with it: one that is right is not blamed.

    Exit codes: 0 if all engines agree, 1 if one differs by more than the tolerance or fails, 3 if all that are
    installed agree and another one is not installed, 128 + the signal after an interruption.

    Raises:
        UsageError: The experiment is wrong whatever the engine, or a name is not an engine.
    """
    names = _split_names(options)
    file = Path(options.config)
    experiment = resolve_settings(file, ["--framework", "native", *context.overrides], context.environ).experiment
    overrides = [*context.overrides, *_list_run_settings(experiment.trainer, options.steps)]
    tolerance = _choose_tolerance(options, is_bf16=experiment.trainer.training.bf16)
    folder = Path(options.output) if options.output else _choose_folder(experiment.workspace)
    taken: list[EngineSteps] = []
    for name in names:
        context.say(f"{name}: training {options.steps} step{'s' if options.steps > 1 else ''}")
        words = [*overrides, "--exp_name", f"compare-{experiment.exp_name}-{name}"]
        taken.append(take_steps(name, file, experiment.stage, words, context))
        context.say(f"{name}: {_format_end(taken[-1])}")
        # After each engine: what was measured is kept, however the others end.
        comparison = compare_engines(taken, tolerance, folder)
        _write_files(comparison, taken, folder)
        if taken[-1].interrupted_by is not None:
            break
    if taken[-1].interrupted_by is None and any(each.first_step_above for each in comparison.engines):
        if experiment.trainer.training.init == "engine" and experiment.trainer.checkpoint.load is None:
            problem = "init: engine: each engine draws weights of its own, and so does native; set init: primus"
            truth = EngineSteps(engine=FLOAT64, problem=problem)
        else:
            context.say("engines disagree: training native in float64, which judges them")
            words = [*overrides, "--exp_name", f"compare-{experiment.exp_name}-float64"]
            judged = next(each for each in taken if each.losses)
            truth = take_float64_steps(file, experiment.stage, words, context, judged)
        context.say(f"{truth.engine}: {_format_end(truth)}")
        comparison = compare_engines(taken, tolerance, folder, truth)
        _write_files(comparison, [*taken, truth], folder)
    context.result(comparison, f"\n{format_comparison(comparison)}\n\nfiles: {folder}")
    return _choose_exit_code(comparison, taken[-1].interrupted_by)


def compare_engines(
    taken: Sequence[EngineSteps], tolerance: ParityTolerance, folder: Path, truth: EngineSteps | None = None
) -> EngineComparison:
    """The comparison of all engines with `truth` if it took its steps, else with the first one that took its steps; if
    none did, with one that took some.
    """
    able = [each for each in ([truth] if truth else []) + list(taken) if each.losses]
    reference = next((each for each in able if not each.problem), able[0] if able else None)
    nothing = EngineSteps(engine="")
    others = [each for each in taken if each is not reference]
    return EngineComparison(
        reference=reference.engine if reference else None,
        tolerance=tolerance,
        reference_steps=reference,
        engines=[compare_steps(reference or nothing, each, tolerance) for each in others],
        output=str(folder),
        float64_problem=truth.problem if truth else "",
    )


def format_comparison(comparison: EngineComparison) -> str:
    """A table of the engines, then problems and the settings in which they cannot agree."""
    everyone = [*([comparison.reference_steps] if comparison.reference_steps else []), *comparison.engines]
    problems = [f"{each.engine}: {_format_problem(each)}" for each in everyone if each.problem]
    if comparison.float64_problem:
        problems.append(f"no reference in float64 tells which engine is right: {comparison.float64_problem}")
    remarks: dict[str, list[str]] = {}
    for each in everyone:
        for text in [*map(_format_setting, each.settings), *each.notes, *_list_nonfinite_steps(each)]:
            remarks.setdefault(text, []).append(each.engine)
    lines = [*problems, *(f"{', '.join(engines)}: {text}" for text, engines in remarks.items())]
    return "\n\n".join([_format_table(comparison), *(["\n".join(lines)] if lines else [])])


def _format_table(comparison: EngineComparison) -> str:
    header = ["engine", "steps", "step 1", "largest", "at step", "grad norm", "above tolerance", "tokens", "lr"]
    reference = comparison.reference_steps
    rows = []
    if reference is not None:
        steps = str(len(reference.losses))
        rows.append([reference.engine, steps, "reference", "", "", "", "", "", ""])
    rows += [_format_row(each) for each in comparison.engines]
    limits = comparison.tolerance
    title = (
        f"differences of the loss (tolerance {limits.first_loss:g} at step 1, {limits.loss:g} at any step),\nand"
        f" relative difference of the gradient norm ({limits.grad_norm:g})"
    )
    return f"{title}\n{table.format_table(header, rows, right=(1, 2, 3, 4, 5))}"


def _format_row(each: EngineParity) -> list[str]:
    if not each.steps:
        state = "refused" if any(setting.is_refused for setting in each.settings) else "failed"
        return [each.engine, "0", state, "-", "-", "-", "-", "-", "-"]
    above = "no" if each.first_step_above is None else f"from step {each.first_step_above}"
    other_rate = each.first_step_of_other_learning_rate
    tokens = {None: "not known", True: "equal", False: f"differ at step {each.first_step_of_other_tokens}"}
    return [
        each.engine,
        str(each.steps),
        _format_difference(each.first_loss_difference),
        _format_difference(each.max_loss_difference),
        str(each.max_loss_step),
        _format_difference(each.max_grad_norm_difference),
        above,
        tokens[each.same_tokens],
        "equal" if other_rate is None else f"differs at step {other_rate}",
    ]


def _format_difference(value: float | None) -> str:
    return "-" if value is None else f"{value:.1e}" if value else "0"


def _format_setting(setting: KeyDifference) -> str:
    how = "is refused" if setting.is_refused else "differs"
    return f"{setting.key}: {format_yaml_value(setting.value)} {how}: {setting.reason}"


def _list_nonfinite_steps(taken: EngineSteps) -> list[str]:
    """A line for the steps of which nothing was compared, if there are any."""
    values = enumerate(zip(taken.losses, taken.grad_norms, strict=True), 1)
    found = [str(step) for step, pair in values if None in pair]
    return [f"loss or gradient norm is not finite at step {', '.join(found)}"] if found else []


def _format_problem(taken: EngineSteps) -> str:
    place = f" (steps: {len(taken.losses)}; {taken.run})" if taken.run else ""
    return "\n  ".join([taken.problem + place, *taken.hint.splitlines()])


def _format_end(taken: EngineSteps) -> str:
    if taken.problem:
        return _format_problem(taken)
    last = taken.losses[-1] if taken.losses else None
    return f"loss {last:.6f} at step {len(taken.losses)} ({taken.run})" if last is not None else "no finite loss"


def _split_names(options: Options) -> list[str]:
    names = [name.strip() for name in options.engines.split(",") if name.strip()]
    if not names or len(set(names)) != len(names):
        raise UsageError(f"--engines {options.engines}: names are missing or repeated", f"such as {DEFAULT_ENGINES}")
    if options.steps < 1:
        raise UsageError(f"--steps {options.steps}: nothing to compare", "take at least 1 step")
    from primus import registry
    from primus.framework import FRAMEWORKS

    for name in names:
        registry.find_plug_in_file(FRAMEWORKS.name, name)  # raises with the nearest name
    return names


def _list_run_settings(trainer: Trainer, steps: int) -> list[str]:
    """Settings of the runs: they take the first steps of the experiment, by its schedule, and only these."""
    end = find_decay_end(trainer.optimizer, trainer.training.train_iters)
    return ["--train_iters", str(steps), "--lr_decay_iters", str(end), *EVERY_RUN]


def _choose_tolerance(options: Options, *, is_bf16: bool) -> ParityTolerance:
    default = BFLOAT16 if is_bf16 else FLOAT32
    if options.tolerance is None:
        return default
    first = min(default.first_loss, options.tolerance)
    return ParityTolerance(first_loss=first, loss=options.tolerance, grad_norm=default.grad_norm)


def _choose_folder(workspace: str) -> Path:
    return Path(workspace) / "comparisons" / store.create_run_id()


def _write_files(comparison: EngineComparison, taken: Sequence[EngineSteps], folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    write_text(folder / "comparison.json", to_json(comparison) + "\n")
    reference = comparison.reference_steps
    if reference is None:
        return
    others = [each for each in taken if each is not reference and each.losses]
    picture = draw_parity(reference, others, comparison.tolerance)
    write_text(folder / "comparison.svg", select_wide(picture) + "\n")
    text = page.make_element("pre", format_comparison(comparison))
    runs = page.make_table(("engine", "run"), [(each.engine, each.run or "-") for each in taken])
    sections = [("Losses", picture), ("Differences", text), ("Runs", runs)]
    write_text(folder / "comparison.html", page.format_page("Engines compared", sections))


def _choose_exit_code(comparison: EngineComparison, interrupted_by: int | None) -> int:
    if interrupted_by is not None:
        return 128 + interrupted_by
    others = [each for each in comparison.engines if not each.agrees]
    reference = comparison.reference_steps
    if reference is None or reference.problem:
        return EXIT_FAILED
    if not others:
        return EXIT_OK
    is_only_missing = all(each.exit_code == EXIT_UNFIT and each.run is None for each in others)
    return EXIT_UNFIT if is_only_missing else EXIT_FAILED
