"""`load:` begins with the weights of another tool's checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from primus import experiment
from primus.checkpoint import convert
from primus.checkpoint.formats.open import open_checkpoint
from primus.errors import PrimusError
from primus.runs import events
from primus.runs.attempt import Attempt
from primus.runs.store import Run

MakeRun = Callable[..., Run]
Train = Callable[..., Attempt]


def read_losses(run: Run) -> list[float]:
    return [event["loss"] for event in events.read_events(run.events) if event["kind"] == "step"]


@pytest.fixture
def converted(make_run: MakeRun, train: Train, tmp_path: Path) -> tuple[Run, Path]:
    """A trained run, and its weights as a folder of Hugging Face."""
    run = make_run("first", train_iters=3)
    train(run)
    spec = experiment.read_run_experiment(run).trainer.model
    opened = open_checkpoint(str(run.checkpoints), spec)
    planned = convert.plan_conversion(opened, convert.TargetSettings(to="huggingface"))
    convert.write_conversion(planned, tmp_path / "hf", lambda _: None)
    return run, tmp_path / "hf"


def test_a_run_begins_with_the_weights_of_a_hugging_face_folder(
    converted: tuple[Run, Path], make_run: MakeRun, train: Train
) -> None:
    first, folder = converted
    by_native = make_run("native", load=str(first.checkpoints), finetune=True, train_iters=2)
    by_folder = make_run("folder", load=str(folder), train_iters=2)
    train(by_native)
    train(by_folder)
    assert read_losses(by_folder) == read_losses(by_native)
    assert read_losses(by_folder)[0] != read_losses(first)[0]


def test_weights_of_another_model_are_refused(converted: tuple[Run, Path], make_run: MakeRun, train: Train) -> None:
    with pytest.raises(PrimusError, match=str(converted[1])):
        train(make_run("wider", load=str(converted[1]), ffn_hidden_size=512))
