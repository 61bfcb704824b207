"""Candidates in the order of their predictions."""

from __future__ import annotations

from pathlib import Path

import pytest

from primus import experiment
from primus.cli.main import main
from primus.config.load import Resolved
from primus.errors import UsageError
from primus.tuning.search.grid import Settings
from primus.tuning.search.ranking import TrialPrediction, rank_candidates

EXAMPLE = Path(__file__).parents[3] / "examples/llama3.1_8B-pretrain.yaml"
SPEEDS = {"1": 100.0, "2": 130.0, "4": 140.0, "8": 150.0, "16": 60.0}


def resolve(settings: Settings) -> Resolved:
    words = [f"{key}={value}" for key, value in settings.items()]
    return experiment.resolve_experiment(EXAMPLE, words, {}, is_elsewhere=True)


def predict(resolved: Resolved) -> TrialPrediction:
    size = resolved.experiment.trainer.training.micro_batch_size
    if size == 2:
        raise UsageError("nothing divides")
    return TrialPrediction(tokens_per_s=SPEEDS[str(size)], memory_bytes=size << 30, device_bytes=6 << 30)


def test_the_fastest_that_fit_come_first_and_those_that_cannot_win_are_not_tried() -> None:
    candidates = [{"micro_batch_size": size} for size in SPEEDS]
    ranked = rank_candidates(candidates, resolve, predict)
    tried = [each.settings["micro_batch_size"] for each in ranked if not each.excluded]
    # The first one is the experiment as written; of the second nothing is predicted.
    assert tried == ["1", "4", "2"]
    reasons = {each.settings["micro_batch_size"]: each.excluded for each in ranked if each.excluded}
    assert reasons == {"8": "does not fit", "16": "does not fit"}


def test_without_predictions_the_order_of_the_keys_stays() -> None:
    candidates = [{"micro_batch_size": size} for size in SPEEDS]
    assert [each.settings for each in rank_candidates(candidates, resolve, None)] == candidates


def test_a_dry_run_shows_the_predicted_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    words = f"--dry-run direct -- tune train --config {EXAMPLE} --keys micro_batch_size=1,8 --assume mi300x:8"
    assert main(words.split()) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if "GiB predicted" in line]
    assert "as written" in lines[0] and lines[-1].endswith("not tried, does not fit")
