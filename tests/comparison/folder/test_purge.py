"""A purge removes what a comparison has made: its results, runs and, if asked for, the token files of its data."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from primus.comparison.folder.comparison_folder import ComparisonFolder, list_comparison_folders
from primus.comparison.folder.purge import find_purged_paths, remove_paths
from primus.comparison.results.result import ComparisonResult, ResultCell
from primus.errors import UsageError
from primus.runs import lock

CELL = ResultCell(platform="cpu", framework="native", model="llama")


@pytest.fixture
def folder(tmp_path: Path) -> ComparisonFolder:
    found = ComparisonFolder(tmp_path / "output" / "night")
    found.update_record("night", "night.yaml", "name: night", [CELL.name])
    data = tmp_path / "data"
    settings = {"dataset": "python-stdlib", "data_path": str(data)}
    found.save_cell_result(ComparisonResult(platform="cpu", cell=CELL, settings=settings))
    for dataset, source in {"python-stdlib": "dataset:python-stdlib", "mine": "texts/mine.jsonl"}.items():
        place = data / dataset / "bpe-512"
        place.mkdir(parents=True)
        (place / f"{dataset}.bin").write_bytes(b"1234")
        (place / f"{dataset}.manifest.json").write_text(json.dumps({"inputs": [{"path": source}]}))
    return found


def test_the_data_stays_unless_it_is_asked_for_and_data_of_others_always(
    folder: ComparisonFolder, tmp_path: Path
) -> None:
    remove_paths(find_purged_paths(folder, has_data=True))
    assert not folder.path.exists() and (tmp_path / "output").exists(), "the workspace may be the user's"
    assert [path.name for path in sorted((tmp_path / "data").iterdir())] == ["mine"]


def test_only_the_comparison_goes_without_data(folder: ComparisonFolder, tmp_path: Path) -> None:
    (tmp_path / "mine.json").write_text("{}")
    link = folder.path / "results/link.json"
    link.symlink_to(tmp_path / "mine.json")
    purged = find_purged_paths(folder, has_data=False)
    assert [Path(path).name for path in purged.paths] == ["comparison.json", f"{CELL.name}.json"]
    assert purged.kept == [str(link)]
    remove_paths(purged)
    assert link.is_symlink() and (tmp_path / "mine.json").exists()
    assert sorted(path.name for path in (tmp_path / "data").iterdir()) == ["mine", "python-stdlib"]


def test_a_comparison_in_use_is_kept(folder: ComparisonFolder) -> None:
    with lock.hold_run(folder.path), pytest.raises(UsageError, match="is used by process"):
        remove_paths(find_purged_paths(folder, has_data=True))
    assert folder.find_result_file(CELL.name).exists()


def test_folders_of_others_are_no_comparisons(tmp_path: Path, folder: ComparisonFolder) -> None:
    (tmp_path / "output" / "other").mkdir()
    (tmp_path / "output" / "other" / "comparison.json").write_text('{"comparison": []}')
    assert [each.path.name for each in list_comparison_folders(tmp_path / "output")] == ["night"]
