"""Runs of one experiment on several engines, each by the launcher in the environment of its engine."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from primus import registry
from primus.backend import BACKENDS
from primus.config.schema import Trainer
from primus.engine_keys import FILE_NAME, KeyDifference, list_key_differences, read_key_rules
from primus.engines.choice import INSTALL_VARIABLE, choose_engine
from primus.errors import EXIT_FAILED, PrimusError
from primus.experiment import resolve_experiment, resolve_settings
from primus.launch.child_run import ChildRun, train_in_child
from primus.runs import events
from primus.runs.store import Run
from primus.task import TaskContext
from primus.tasks.compare._parity import EngineSteps

RECORD_VARIABLE = "PRIMUS_RECORD_BATCHES"
"""As in primus.session.batch_record, which imports numpy."""


def take_steps(engine: str, file: Path, overrides: Sequence[str], context: TaskContext) -> EngineSteps:
    """Train on one engine; a failure is part of the result."""
    words = ["--framework", engine, *overrides]
    settings: list[KeyDifference] = []
    try:
        backend = registry.load_plug_in(BACKENDS, engine)
        # On the default framework, which knows each key, also of what it cannot train.
        asked = resolve_settings(file, ["--framework", "native", *overrides], context.environ)
        settings = find_settings(engine, asked.experiment.trainer)
        resolve_experiment(file, words, context.environ)
        environ = {**context.environ, INSTALL_VARIABLE: context.environ.get(INSTALL_VARIABLE, "never")}
        choose_engine(tuple(backend.ENGINES), environ)
    except PrimusError as error:
        return EngineSteps(
            engine=engine, problem=error.problem, hint=error.hint, exit_code=error.exit_code, settings=settings
        )
    nproc = context.layout.nproc if context.layout else None
    return _read_result(engine, settings, train_in_child(file, words, {**environ, RECORD_VARIABLE: "1"}, nproc))


def find_settings(engine: str, trainer: Trainer) -> list[KeyDifference]:
    """Settings of `trainer` in which an engine cannot agree with native; none if it has no table of keys."""
    file = registry.find_plug_in_file(BACKENDS.name, engine)
    if file is None or not (file.parent / FILE_NAME).is_file():
        return []
    return list_key_differences(read_key_rules(file.parent), trainer)


def _read_result(engine: str, settings: list[KeyDifference], child: ChildRun) -> EngineSteps:
    printed, errors, code = child
    if "run" not in printed:
        lines = [line.removeprefix("primus-cli: ") for line in errors.strip().splitlines()] or [f"exit code {code}"]
        return EngineSteps(engine=engine, problem=lines[-1], exit_code=code or EXIT_FAILED, settings=settings)
    run = Run(Path(printed["run"]))
    steps = events.read_steps(run.events)
    outcome = printed["outcome"]
    failure = outcome.get("first_failure") or {}
    return EngineSteps(
        engine=engine,
        run=str(run.directory),
        problem="" if outcome["state"] == "done" else outcome["reason"],
        hint=failure.get("hint") or "",
        exit_code=code,
        losses=[_parse_number(event.get("loss")) for event in steps],
        grad_norms=[_parse_number(event.get("grad_norm")) for event in steps],
        tokens=_read_tokens(run, steps),
        settings=settings,
    )


def _read_tokens(run: Run, steps: Sequence[events.Event]) -> list[Mapping[str, int]] | None:
    """Checksums of the samples of each step; None if the engine was not given its batches by primus."""
    record: dict[int, dict[str, int]] = {}
    for path in sorted(run.directory.glob("logs/attempt_*/batches_rank_*.jsonl")):
        for line in path.read_text(encoding="utf-8").splitlines():
            taken = msgspec.json.decode(line)
            record.setdefault(taken["consumed_samples"], {}).update(taken["samples"])
    return [record.get(event["consumed_samples"], {}) for event in steps] if record else None


def _parse_number(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None
