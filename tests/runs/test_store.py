"""Run folders are made, found and locked by name; files in them are whole or absent."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from primus.errors import PrimusError, UsageError
from primus.runs import files, store
from primus.runs.store import Run, RunMetadata, RunOutcome

Make = Callable[..., Run]


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Make:
    monkeypatch.chdir(tmp_path)

    def make(name: str = "a", run_id: str | None = None) -> Run:
        run_id = run_id or store.create_run_id()
        return store.create_run(
            Path("out") / name / run_id, RunMetadata(id=run_id, name=name, task="t", created=time.time())
        )

    return make


def test_an_id_is_its_time_and_sorts_by_it() -> None:
    assert store.create_run_id(0.0)[:4] in ("1969", "1970")
    assert len({store.create_run_id(0.0) for _ in range(50)}) > 40
    assert store.create_run_id(1e9) < store.create_run_id(1e9 + 1) < store.create_run_id(2e9)


def test_a_new_run_is_planned_and_the_latest(make: Make) -> None:
    first, second = make(run_id="20250101_000000-aaaa"), make(run_id="20250101_000001-0000")
    assert first.read_metadata().outcome == RunOutcome(state="planned")
    assert os.readlink("out/a/latest") == second.id
    assert [run.id for run in store.list_runs(Path("out/a"))] == [first.id, second.id]


def test_the_logs_of_the_newest_run_are_next_to_it(make: Make) -> None:
    for run_id in ("20250101_000000-aaaa", "20250101_000001-0000"):
        folder = make(run_id=run_id).directory / "logs"
        folder.mkdir()
        (folder / "rank_0.log").write_text(run_id)
    assert Path("out/a/logs/rank_0.log").read_text() == "20250101_000001-0000"
    assert not Path("out/a/tensorboard").exists()
    (Path("out/a/latest") / "tensorboard").mkdir()
    assert Path("out/a/tensorboard").is_dir()
    store.point_links(Path("out/a"), "")
    assert {entry.name for entry in Path("out/a").iterdir()} == {"20250101_000000-aaaa", "20250101_000001-0000"}


def test_a_folder_of_the_user_stays_in_the_place_of_a_link(make: Make) -> None:
    Path("out/a/logs").mkdir(parents=True)
    make()
    store.point_links(Path("out/a"), "")
    assert Path("out/a/logs").is_dir() and not Path("out/a/logs").is_symlink()


def test_a_run_is_never_made_twice(make: Make) -> None:
    make(run_id="20250101_000000-aaaa")
    with pytest.raises(PrimusError, match="cannot be created: File exists"):
        make(run_id="20250101_000000-aaaa")


def test_changes_keep_the_rest(make: Make) -> None:
    run = make()
    run.update_metadata(attempts=3, outcome=RunOutcome(state="failed", exit_code=1))
    assert (run.read_metadata().attempts, run.read_metadata().outcome.state, run.read_metadata().task) == (
        3,
        "failed",
        "t",
    )


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("20250102", "20250102_000000-bbbb"),
        ("20250101_000000-a", "20250101_000000-aaaa"),
        ("a", "20250102_000000-bbbb"),
        ("b", "20250101_000000-cccc"),
        ("b/20250101_000000-cccc", "20250101_000000-cccc"),
        ("out/a/latest", "20250102_000000-bbbb"),
        ("out/b/20250101_000000-cccc", "20250101_000000-cccc"),
    ],
)
def test_a_run_is_found_by_folder_id_beginning_or_experiment(make: Make, name: str, found: str) -> None:
    for experiment, run_id in [
        ("a", "20250101_000000-aaaa"),
        ("a", "20250102_000000-bbbb"),
        ("b", "20250101_000000-cccc"),
    ]:
        make(experiment, run_id)
    assert store.find_run(name, Path("out")).id == found


@pytest.mark.parametrize(
    ("name", "problem", "hint"),
    [
        ("2025", "'2025' matches 2 runs", "for example 20250101_000000-aaaa and 20250101_000000-cccc"),
        ("/no/such", "/no/such: no such file or folder", "list the runs"),
        ("nigth", "no run 'nigth' in out", "did you mean 'night'?"),
        ("", "'' matches 2 runs", "for example"),
        ("x" * 300, "no run 'xxx", "valid: "),
        ("out/night", "out/night is not a run folder: it has no metadata.json", "list the runs"),
    ],
)
def test_an_unclear_name_is_one_message(make: Make, name: str, problem: str, hint: str) -> None:
    make("night", "20250101_000000-aaaa")
    make("b", "20250101_000000-cccc")
    with pytest.raises(UsageError) as caught:
        store.find_run(name, Path("out"))
    assert caught.value.problem.startswith(problem)
    assert caught.value.hint.startswith(hint)


def test_what_is_no_run_is_not_listed(make: Make) -> None:
    run = make()
    Path("out/a/notes").mkdir()
    Path("out/file").touch()
    Path("out/a/.deleted.x").mkdir()
    assert [found.id for found in store.list_workspace_runs(Path("out"))] == [run.id]
    assert store.list_workspace_runs(Path("nowhere")) == []


def test_a_damaged_run_is_certainly_one_of_ours(make: Make, tmp_path: Path) -> None:
    run = make()
    link = tmp_path / run.id
    link.symlink_to(run.directory.resolve())
    assert not store.is_damaged_run(run.directory)
    metadata = run.directory / "metadata.json"
    metadata.write_text('{"another": "tool"}')
    assert not store.is_damaged_run(run.directory)
    metadata.write_text("{")
    assert not store.is_damaged_run(run.directory), "nothing else says whose it is"
    (run.directory / "request.json").write_text("{}")
    assert store.is_damaged_run(run.directory) and not store.is_damaged_run(link)
    metadata.unlink()
    assert store.is_damaged_run(run.directory)


def test_a_lock_is_held_against_other_processes_and_ends_with_its_own(make: Make) -> None:
    run = make()
    assert not run.is_active()
    assert not (run.directory / ".lock").exists(), "looking changes nothing"
    script = (
        "import sys, time\nfrom pathlib import Path\nfrom primus.runs.store import Run\n"
        "with Run(Path(sys.argv[1])).hold_lock() as ours:\n    print(ours, flush=True)\n    time.sleep(30)\n"
    )
    environment = os.environ | {"PYTHONPATH": str(Path(store.__file__).parents[2])}
    with subprocess.Popen(
        [sys.executable, "-c", script, run.directory], stdout=subprocess.PIPE, env=environment
    ) as other:
        assert other.stdout
        assert other.stdout.readline() == b"True\n"
        assert run.is_active()
        with run.hold_lock() as ours:
            assert not ours
        other.kill()
    assert not run.is_active()
    with run.hold_lock() as ours:
        assert ours
        assert run.is_active()


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[]", b'{"id": 3}', b"\xff\xfe", b'{"id": "x", "name": "a", "task": "t"}']
)
def test_damaged_metadata_is_one_message(make: Make, content: bytes) -> None:
    run = make()
    (run.directory / "metadata.json").write_bytes(content)
    with pytest.raises(PrimusError, match=r"metadata\.json: damaged: ") as caught:
        run.read_metadata()
    assert "runs clean --damaged" in caught.value.hint


def test_metadata_of_a_newer_version_is_read(make: Make) -> None:
    run = make()
    path = run.directory / "metadata.json"
    path.write_text(path.read_text().replace('"task"', '"from_the_future": [1],\n  "task"'))
    assert run.read_metadata().task == "t"


def test_a_file_that_cannot_be_written_leaves_the_old_one(tmp_path: Path) -> None:
    target = tmp_path / "file"
    files.write_text(target, "old")
    (tmp_path / f".file.tmp.{os.getpid()}").mkdir()
    with pytest.raises(PrimusError, match="cannot be written"):
        files.write_text(target, "new")
    assert target.read_text() == "old"


def test_a_full_disk_is_one_message_and_leaves_nothing(tmp_path: Path) -> None:
    if not os.path.exists("/dev/full"):
        pytest.skip("this system has no /dev/full")
    (tmp_path / f".file.tmp.{os.getpid()}").symlink_to("/dev/full")
    with pytest.raises(PrimusError, match="file: cannot be written: No space left on device") as caught:
        files.write_text(tmp_path / "file", "new")
    assert "free some space" in caught.value.hint
    assert list(tmp_path.iterdir()) == []
