"""`data inspect` shows exactly what the backend trained on."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from numpy.typing import NDArray

from primus.cli.main import main
from primus.data.megatron.indexed_dataset import IndexedWriter
from primus.data.training.loader import Batches
from primus.errors import EXIT_OK, EXIT_UNFIT
from primus.runs.store import Run
from primus.session.batches import batch_record


class RememberedBatches(Batches):
    """The loader, which remembers what it gave."""

    steps: ClassVar[list[list[NDArray[np.int64]]]] = []

    def __next__(self) -> list[NDArray[np.int64]]:
        step = super().__next__()
        self.steps.append(step)
        return step


@pytest.fixture
def trained(
    tmp_path: Path, make_run: Callable[..., Run], train: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> tuple[Run, list[list[NDArray[np.int64]]]]:
    """A run that has trained on two blended files, and the micro batches of its steps."""
    for name, size in (("one", 4000), ("two", 1500)):
        with IndexedWriter(tmp_path / name, np.dtype(np.uint16)) as writer:
            for length in np.random.default_rng(size).integers(1, 90, size // 45).tolist():
                writer.add_document(np.random.default_rng(length).integers(0, 250, length))
            writer.commit()
    blend = ["0.7", str(tmp_path / "one"), "0.3", str(tmp_path / "two")]
    run = make_run(mock_data=False, train_data_path=blend, global_batch_size=6, train_iters=5)
    (run.directory / "metadata.json").write_text(json.dumps({"id": "r", "name": "t"}))
    steps: list[list[NDArray[np.int64]]] = []
    monkeypatch.setattr(RememberedBatches, "steps", steps)
    monkeypatch.setattr(batch_record, "Batches", RememberedBatches)
    train(run)
    return run, steps


def test_the_ids_of_every_step_are_those_that_were_trained_on(
    trained: tuple[Run, list[list[NDArray[np.int64]]]], capsys: pytest.CaptureFixture[str]
) -> None:
    run, steps = trained
    capsys.readouterr()
    assert len(steps) == 5
    for number, micro_batches in enumerate(steps, start=1):
        words = ["inspect", "--run", str(run.directory), "--step", str(number), "--json"]
        assert main(["direct", "--", "data", *words]) == EXIT_OK
        shown = json.loads(capsys.readouterr().out)
        assert shown["step"]["recorded"]
        assert [sample["ids"] for sample in shown["samples"]] == np.concatenate(micro_batches).tolist()


def test_data_that_changed_since_the_run_is_refused(
    trained: tuple[Run, list[list[NDArray[np.int64]]]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, _ = trained
    content = bytearray((tmp_path / "one.bin").read_bytes())
    content[10] ^= 1
    (tmp_path / "one.bin").write_bytes(content)
    assert main(["direct", "--", "data", "inspect", "--run", str(run.directory), "--step", "2"]) == EXIT_UNFIT
    assert "the data is not what the run was trained on" in capsys.readouterr().err


def test_a_step_that_the_run_has_not_reached_is_an_error(
    trained: tuple[Run, list[list[NDArray[np.int64]]]], capsys: pytest.CaptureFixture[str]
) -> None:
    run, _ = trained
    assert main(["direct", "--", "data", "inspect", "--run", str(run.directory), "--step", "6"]) == 2
    assert "step 6 is not recorded, the last is 5" in capsys.readouterr().err
