"""Runs of one experiment on several engines, each by the launcher in the environment of its engine."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from pathlib import Path

import msgspec
from msgspec import structs

from primus import registry
from primus.comparison.engines.parity import EngineSteps
from primus.comparison.results.batch_records import RECORD_VARIABLE, read_batch_records
from primus.comparison.results.step_metrics import list_finite
from primus.config.schema import Stage, Trainer
from primus.engine_keys import FILE_NAME, KeyDifference, list_key_differences, read_key_rules
from primus.engines.environment import prepare_engine
from primus.errors import EXIT_FAILED, PrimusError
from primus.experiment import resolve_experiment, resolve_settings
from primus.framework import FRAMEWORKS
from primus.launch.child_run import ChildRun, train_in_child
from primus.runs import events
from primus.runs.store import Run
from primus.task import TaskContext

FLOAT64_VARIABLE = "PRIMUS_NATIVE_FLOAT64"
"""The value in primus.frameworks.native.engine.run, which imports torch."""
FLOAT64 = "native in float64"
ONE_PROCESS = (
    *("--tensor_model_parallel_size", "1", "--pipeline_model_parallel_size", "1", "--context_parallel_size", "1"),
    *("--expert_model_parallel_size", "1", "--sequence_parallel", "false"),
)
"""The layout of the reference in float64; it has the batch of the engines, whatever theirs is."""


def take_steps(engine: str, file: Path, stage: Stage, overrides: Sequence[str], context: TaskContext) -> EngineSteps:
    """Train on one engine; a failure is part of the result, and so is a signal that stops it."""
    words = ["--framework", engine, *overrides]
    known = EngineSteps(engine=engine)
    try:
        backend = registry.load_plug_in(FRAMEWORKS, engine)
        # On the default framework, which knows each key, also of what it cannot train.
        asked = resolve_settings(file, ["--framework", "native", *overrides], context.environ, stage)
        known = structs.replace(known, settings=find_settings(engine, asked.experiment.trainer))
        known = structs.replace(known, notes=list(resolve_experiment(file, words, context.environ, stage).notes))
        # Here, because the output of a child is not shown.
        prepare_engine(tuple(backend.ENGINES), context.environ, context.say)
    except PrimusError as error:
        return structs.replace(known, problem=error.problem, hint=error.hint, exit_code=error.exit_code)
    nproc = context.layout.nproc if context.layout else None
    child = train_in_child(file, words, {**context.environ, RECORD_VARIABLE: "1"}, nproc, stage)
    return _add_result(known, child)


def take_float64_steps(
    file: Path, stage: Stage, overrides: Sequence[str], context: TaskContext, judged: EngineSteps
) -> EngineSteps:
    """Train on native in float64, with the batch of an engine that took steps; a failure is part of the result."""
    (first, *_) = events.read_steps(Run(Path(judged.run or "")).events)
    words = [*overrides, *ONE_PROCESS, "--bf16", "false", "--fp8", "null", "--compile", "false"]
    words += ["--allow_settings_not_in_force", "true"]  # no key asks for float64
    words += ["--framework", "native", "--global_batch_size", str(first["global_batch_size"])]
    variables = {**context.environ, RECORD_VARIABLE: "1", FLOAT64_VARIABLE: "1"}
    return _add_result(EngineSteps(engine=FLOAT64), train_in_child(file, words, variables, 1, stage))


def find_settings(engine: str, trainer: Trainer) -> list[KeyDifference]:
    """Settings of `trainer` in which an engine cannot agree with native; none if it has no table of keys."""
    file = registry.find_plug_in_file(FRAMEWORKS.name, engine)
    if file is None or not (file.parent / FILE_NAME).is_file():
        return []
    return list_key_differences(read_key_rules(file.parent), trainer)


def _add_result(known: EngineSteps, child: ChildRun) -> EngineSteps:
    if "run" not in child.printed:
        problem, hint = split_errors(child.errors)
        return structs.replace(
            known,
            problem=problem or f"exit code {child.exit_code}",
            hint=hint,
            exit_code=child.exit_code or EXIT_FAILED,
            interrupted_by=child.interrupted_by,
        )
    run = Run(Path(child.printed["run"]))
    steps = events.read_steps(run.events)
    outcome = child.printed["outcome"]
    failure = outcome.get("first_failure") or {}
    return structs.replace(
        known,
        run=str(run.directory),
        problem="" if outcome["state"] == "done" else outcome["reason"],
        hint=failure.get("hint") or "",
        exit_code=child.exit_code,
        interrupted_by=child.interrupted_by,
        losses=list_finite(steps, "loss"),
        grad_norms=list_finite(steps, "grad_norm"),
        learning_rates=list_finite(steps, "learning_rate"),
        tokens=_read_tokens(run, steps),
    )


def split_errors(text: str) -> tuple[str, str]:
    """The last message of the launcher on standard error, and its hint."""
    _, mark, message = f"\n{text.strip()}".rpartition("\nprimus-cli: ")
    lines = (message if mark else text.strip().rpartition("\n")[2]).splitlines() or [""]
    return lines[0], "\n".join(line.strip() for line in lines[1:])


def _read_tokens(run: Run, steps: Sequence[events.Event]) -> list[int] | None:
    """Checksum of the samples of each step; None if the engine was not given its batches by primus."""
    record = read_batch_records(run)
    if not record:
        return None
    taken = [record.get(event["consumed_samples"]) for event in steps]
    return [zlib.crc32(msgspec.json.encode(each.samples if each else {}, order="sorted")) for each in taken]
