"""The working folder of a run, by which another folder finds its relative paths."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec import structs

from primus.config.extended_files import load_model
from primus.config.schema import CheckpointConfig, DataConfig, Trainer
from primus.runs.store import Run, RunMetadata, create_run
from primus.runs.working_folder import anchor_paths, find_working_folder


@pytest.mark.parametrize(
    ("workspace", "expected"), [("./output", "/a"), ("x/output", "/a/.."), (".", "/a/output"), ("/a/output", None)]
)
def test_the_folder_of_a_run_without_a_record_follows_from_its_workspace(
    workspace: str, expected: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    found = find_working_folder(Run(Path("/a/output/night/20250101_000000-abcd")), workspace)
    elsewhere = workspace == "x/output"  # the run was moved
    assert found == (tmp_path if expected is None or elsewhere else Path(expected))


def test_the_recorded_folder_counts_while_it_exists(tmp_path: Path) -> None:
    (tmp_path / "started").mkdir()
    metadata = RunMetadata(
        id="20250101_000000-abcd", name="n", task="t", created=1, working_folder=str(tmp_path / "started")
    )
    run = create_run(tmp_path / "moved/output/n/20250101_000000-abcd", metadata)
    assert find_working_folder(run, "./output") == tmp_path / "started"
    (tmp_path / "started").rmdir()
    assert find_working_folder(run, "./output") == tmp_path / "moved"


def test_relative_paths_of_an_experiment_are_those_below_the_folder(tmp_path: Path) -> None:
    (tmp_path / "tok").mkdir()
    data = DataConfig(
        train_data_path="0.5 a 1.5 /b", valid_data_path=["v"], tokenizer_model="tok", sft_data_path="hf:o/n"
    )
    trainer = Trainer(
        framework="native",
        model=load_model("tiny.yaml"),
        data=structs.replace(data, data_path="d"),
        checkpoint=CheckpointConfig(load="hf:tok"),
    )
    found = anchor_paths(trainer, tmp_path)
    assert found.data.train_data_path == ["0.5", f"{tmp_path}/a", "1.5", "/b"]
    assert found.data.valid_data_path == [f"{tmp_path}/v"]
    assert found.data.test_data_path is None
    assert (found.data.data_path, found.data.tokenizer_model) == (f"{tmp_path}/d", f"{tmp_path}/tok")
    assert found.data.sft_data_path == "hf:o/n"  # of the hub
    assert found.checkpoint.load == f"hf:{tmp_path}/tok"
