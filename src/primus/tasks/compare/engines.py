"""Train the first steps of an experiment on several engines, and compare losses, gradient norms and tokens."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from msgspec import Struct

from primus.config.schedule import decay_end
from primus.config.schema import Trainer
from primus.engine_keys import KeyDifference, format_yaml_value
from primus.errors import EXIT_FAILED, EXIT_OK, EXIT_UNFIT, UsageError
from primus.experiment import resolve_settings
from primus.report import page, table
from primus.runs import store
from primus.runs.files import to_json, write_text
from primus.task import TaskContext
from primus.tasks.compare import _engine_runs, _parity, _picture
from primus.tasks.compare._parity import EngineParity, EngineSteps, ParityTolerance

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
    """Engines, separated by commas; the first one that trains is the reference."""
    steps: int = 20
    """Optimizer steps of each engine."""
    tolerance: float | None = None
    """Largest difference of a loss; 5e-5 in fp32, 5e-2 in bf16."""
    output: str | None = None
    """Folder of comparison.json, comparison.svg and comparison.html; in `comparisons` of the workspace when omitted."""


class EngineComparison(Struct, frozen=True, kw_only=True):
    """The result of `compare engines`."""

    reference: str | None
    """Engine that the others are compared with; None if none took a step."""
    tolerance: ParityTolerance
    reference_steps: EngineSteps | None
    engines: list[EngineParity]
    output: str


def run(options: Options, context: TaskContext) -> int:
    """Train on each engine, one after the other, and print the comparison.

    Exit codes: 0 if all engines agree, 1 if one differs by more than the tolerance or fails, 3 if all that are
    installed agree and another one is not installed.

    Raises:
        UsageError: The experiment is wrong whatever the engine, or a name is not an engine.
    """
    names = _split_names(options)
    file = Path(options.config)
    experiment = resolve_settings(file, ["--framework", "native", *context.overrides], context.environ).experiment
    overrides = [*context.overrides, *_list_run_settings(experiment.trainer, options.steps)]
    tolerance = _choose_tolerance(options, is_bf16=experiment.trainer.training.bf16)
    folder = Path(options.output) if options.output else _choose_folder(experiment.workspace)
    taken = []
    for name in names:
        context.say(f"{name}: training {options.steps} steps")
        words = [*overrides, "--exp_name", f"compare-{experiment.exp_name}-{name}"]
        taken.append(_engine_runs.take_steps(name, file, words, context))
        context.say(f"{name}: {_format_end(taken[-1])}")
    comparison = compare_engines(taken, tolerance, folder)
    _write_files(comparison, taken, folder)
    context.result(comparison, f"\n{format_comparison(comparison)}\n\nfiles: {folder}")
    return _choose_exit_code(comparison)


def compare_engines(taken: Sequence[EngineSteps], tolerance: ParityTolerance, folder: Path) -> EngineComparison:
    """The comparison of all engines with the first one that took its steps."""
    reference = next((each for each in taken if each.losses and not each.problem), None)
    nothing = EngineSteps(engine="")
    others = [each for each in taken if each is not reference]
    return EngineComparison(
        reference=reference.engine if reference else None,
        tolerance=tolerance,
        reference_steps=reference,
        engines=[_parity.compare_steps(reference or nothing, each, tolerance) for each in others],
        output=str(folder),
    )


def format_comparison(comparison: EngineComparison) -> str:
    """A table of the engines, then problems and the settings in which they cannot agree."""
    problems = [
        f"{each.engine}: {each.problem}" + (f"\n  {each.hint}" if each.hint else "")
        for each in comparison.engines
        if each.problem
    ]
    settings = [
        f"{engine}: {setting.key}: {format_yaml_value(setting.value)}"
        f" {'is refused' if setting.is_refused else 'differs'}: {setting.reason}"
        for engine, setting in _list_settings(comparison)
    ]
    return "\n\n".join(
        [_format_table(comparison), *(["\n".join([*problems, *settings])] if problems or settings else [])]
    )


def _format_table(comparison: EngineComparison) -> str:
    header = ["engine", "steps", "step 1", "largest", "at step", "grad norm", "above tolerance", "tokens"]
    reference = comparison.reference_steps
    rows = []
    if reference is not None:
        steps = str(len(reference.losses))
        rows.append([reference.engine, steps, "reference", "", "", "", "", ""])
    rows += [_format_row(each) for each in comparison.engines]
    limits = comparison.tolerance
    title = (
        f"differences of the loss (tolerance {limits.first_loss:g} at step 1, {limits.loss:g} at any step),\nand"
        f" relative difference of the gradient norm ({limits.grad_norm:g})"
    )
    return f"{title}\n{table.format_table(header, rows, right=(1, 2, 3, 4, 5))}"


def _format_row(each: EngineParity) -> list[str]:
    if not each.steps:
        return [each.engine, "0", "-", "-", "-", "-", "-", "-"]
    above = "no" if each.first_step_above is None else f"from step {each.first_step_above}"
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
    ]


def _format_difference(value: float | None) -> str:
    return "-" if value is None else f"{value:.1e}" if value else "0"


def _list_settings(comparison: EngineComparison) -> list[tuple[str, KeyDifference]]:
    """Each setting in which an engine cannot agree with native, with the engine."""
    first = comparison.reference_steps
    found = [(first.engine, setting) for setting in first.settings] if first else []
    return found + [(each.engine, setting) for each in comparison.engines for setting in each.settings]


def _format_end(taken: EngineSteps) -> str:
    if taken.problem:
        return taken.problem + (f"\n  {taken.hint}" if taken.hint else "")
    last = taken.losses[-1] if taken.losses else None
    return f"loss {last:.6f} after {len(taken.losses)} steps ({taken.run})" if last is not None else "no finite loss"


def _split_names(options: Options) -> list[str]:
    names = [name.strip() for name in options.engines.split(",") if name.strip()]
    if not names or len(set(names)) != len(names):
        raise UsageError(f"--engines {options.engines}: names are missing or repeated", f"such as {DEFAULT_ENGINES}")
    if options.steps < 1:
        raise UsageError(f"--steps {options.steps}: nothing to compare", "take at least 1 step")
    from primus import registry
    from primus.backend import BACKENDS

    for name in names:
        registry.find_plug_in_file(BACKENDS.name, name)  # raises with the nearest name
    return names


def _list_run_settings(trainer: Trainer, steps: int) -> list[str]:
    """Settings of the runs: they take the first steps of the experiment, by its schedule, and only these."""
    end = decay_end(trainer.optimizer, trainer.training.train_iters)
    return ["--train_iters", str(steps), "--lr_decay_iters", str(end), *EVERY_RUN]


def _choose_tolerance(options: Options, *, is_bf16: bool) -> ParityTolerance:
    default = _parity.BFLOAT16 if is_bf16 else _parity.FLOAT32
    if options.tolerance is None:
        return default
    first = min(default.first_loss, options.tolerance)
    return ParityTolerance(first_loss=first, loss=options.tolerance, grad_norm=default.grad_norm)


def _choose_folder(workspace: str) -> Path:
    return Path(workspace) / "comparisons" / store.new_id()


def _write_files(comparison: EngineComparison, taken: Sequence[EngineSteps], folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    write_text(folder / "comparison.json", to_json({"comparison": comparison, "steps": taken}) + "\n")
    reference = comparison.reference_steps
    if reference is None:
        return
    others = [each for each in taken if each is not reference and each.losses]
    picture = _picture.draw_parity_svg(reference, others, comparison.tolerance)
    write_text(folder / "comparison.svg", picture + "\n")
    text = page.make_element("pre", format_comparison(comparison))
    runs = page.make_table(("engine", "run"), [(each.engine, each.run or "-") for each in taken])
    sections = [("Losses", picture), ("Differences", text), ("Runs", runs)]
    write_text(folder / "comparison.html", page.format_page("Engines compared", sections))


def _choose_exit_code(comparison: EngineComparison) -> int:
    others = [each for each in comparison.engines if not each.agrees]
    if not others and comparison.reference is not None:
        return EXIT_OK
    is_only_missing = comparison.reference is not None and all(
        each.exit_code == EXIT_UNFIT and each.run is None for each in others
    )
    return EXIT_UNFIT if is_only_missing else EXIT_FAILED
