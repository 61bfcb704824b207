from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from primus.config.load import load_experiment
from primus.config.schema import Experiment
from primus.data.open_samples import open_samples
from primus.data.training import step_samples
from primus.errors import UsageError
from primus.runs.store import Run


@pytest.fixture
def experiment(tmp_path: Path) -> Experiment:
    settings: dict[str, Any] = {"micro_batch_size": 2, "mock_data": True}
    module = {"framework": "native", "model": "tiny", "overrides": settings}
    (tmp_path / "e.json").write_text(json.dumps({"exp_name": "t", "modules": {"pre_trainer": module}}))
    return load_experiment(tmp_path / "e.json", environ={}).experiment


def run_with(folder: Path, *recorded: dict[str, Any]) -> Run:
    (folder / "events.jsonl").write_text("".join(json.dumps({"time": 1.0, **event}) + "\n" for event in recorded))
    return Run(folder)


def started(world_size: int, fingerprint: str = "a") -> dict[str, Any]:
    return {"kind": "run_started", "world_size": world_size, "data_fingerprint": fingerprint}


def step(number: int, consumed: int, size: int = 8) -> dict[str, Any]:
    return {"kind": "step", "step": number, "consumed_samples": consumed, "global_batch_size": size}


def test_a_step_after_a_rewind_has_the_data_that_came_after_what_was_passed_over(
    tmp_path: Path, experiment: Experiment
) -> None:
    rewind = {"kind": "rewind", "to_step": 1}
    run = run_with(tmp_path, started(1), step(1, 8), step(2, 16), step(3, 24), rewind, step(2, 32), step(3, 40))
    assert [step_samples.find_recorded_step(run, experiment, number)[0].first_sample for number in (1, 2, 3)] == [
        0,
        24,
        32,
    ]
    assert step_samples.find_step_of_sample(run, 25) == 2
    with pytest.raises(UsageError, match="no step has trained on sample 17"):
        step_samples.find_step_of_sample(run, 17)


def test_a_step_that_a_rewind_has_undone_is_not_shown(tmp_path: Path, experiment: Experiment) -> None:
    run = run_with(tmp_path, started(1), step(1, 8), step(2, 16), {"kind": "rewind", "to_step": 1})
    with pytest.raises(UsageError, match="step 2 is not recorded"):
        step_samples.find_recorded_step(run, experiment, 2)


def test_ranks_are_those_of_the_attempt_that_took_the_step(tmp_path: Path, experiment: Experiment) -> None:
    run = run_with(tmp_path, started(4), step(1, 8), started(2, "b"), step(2, 16))
    found = [step_samples.find_recorded_step(run, experiment, number) for number in (1, 2)]
    assert [(each.world_size, fingerprint) for each, fingerprint in found] == [(4, "a"), (2, "b")]
    assert [found[0][0].locate_sample(sample) for sample in range(8)] == [(r, 0) for r in (0, 0, 1, 1, 2, 2, 3, 3)]


def test_random_tokens_have_no_documents(experiment: Experiment) -> None:
    data = open_samples(experiment.trainer)
    chosen = step_samples.plan_step(experiment, 2, world_size=1)
    (sample,) = step_samples.read_samples(chosen, data, experiment.trainer, [chosen.first_sample])
    assert sample.parts == [] and sample.text is None and len(sample.ids) == experiment.trainer.training.seq_length + 1
