"""`runs clean` deletes only what is provably a run that nobody uses, inside of its workspace."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from fakes.users import as_another_user
from primus.cli.main import main
from primus.runs import lock, store
from primus.runs.store import Run, RunMetadata, RunOutcome

Make = Callable[..., Run]
RUN_ID = "20250101_000000-abcd"
EVERYTHING = ["--older-than-days", "1e-9", "--yes"]


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Make:
    monkeypatch.chdir(tmp_path)

    def make(run_id: str = RUN_ID, name: str = "night", workspace: str = "output") -> Run:
        metadata = RunMetadata(
            id=run_id, name=name, task="t", created=1.0, outcome=RunOutcome(state="failed", exit_code=1)
        )
        run = store.create_run(Path(workspace) / name / run_id, metadata)
        (run.directory / "request.json").write_text("{}")
        return run

    return make


def clean(*words: str) -> int:
    return main(["direct", "--", "runs", "clean", *words])


FOREIGN = {
    "another tool's metadata": ("results", '{"model": "x", "accuracy": 0.9}'),
    "another tool's id": ("results", '{"id": "results", "name": "x", "task": "t", "created": 1.0}'),
    "a file that is not JSON": ("results", "half {"),
    "the name of a run alone": (RUN_ID, "half {"),
    "the name of a run, metadata of another tool": (RUN_ID, '{"model": "x"}'),
    "a renamed copy": ("best", json.dumps({"id": RUN_ID, "name": "n", "task": "t", "created": 1.0})),
    "another run's id": ("20250102_000000-abcd", json.dumps({"id": RUN_ID, "name": "n", "task": "t", "created": 1.0})),
}


@pytest.mark.parametrize("condition", [EVERYTHING, ["--failed", "--yes"], [*EVERYTHING, "--damaged"]])
@pytest.mark.parametrize(("name", "text"), FOREIGN.values(), ids=FOREIGN)
def test_what_is_not_provably_a_run_stays(make: Make, name: str, text: str, condition: list[str]) -> None:
    make("20250103_000000-0000")
    folder = Path("output/night") / name
    folder.mkdir()
    (folder / "metadata.json").write_text(text)
    (folder / "weights.bin").write_text("precious")
    assert clean(*condition) == 0
    assert (folder / "weights.bin").read_text() == "precious"
    assert Path("output/night/20250103_000000-0000").exists() == ("--damaged" in condition)


def test_a_damaged_run_is_deleted_only_where_that_is_asked_for(make: Make, capsys: pytest.CaptureFixture[str]) -> None:
    damaged, sound = make(), make("20250102_000000-abcd")
    (damaged.directory / "metadata.json").write_text('{"id": "2025')
    assert clean(*EVERYTHING) == 0
    assert damaged.directory.exists()
    assert not sound.directory.exists()
    assert clean("--damaged", "--yes") == 0
    assert not damaged.directory.exists()
    assert "deleted 20250101_000000-abcd  night  damaged" in capsys.readouterr().out


def test_links_are_not_followed(make: Make) -> None:
    outside = make(workspace="elsewhere")
    make("20250102_000000-0000", name="own")
    Path("output/linked").symlink_to("../elsewhere/night")
    Path(f"output/own/{RUN_ID}").symlink_to(f"../../elsewhere/night/{RUN_ID}")
    assert clean(*EVERYTHING) == 0
    assert outside.read_metadata().id == RUN_ID
    assert Path(f"output/own/{RUN_ID}").is_symlink()
    assert not Path("output/own/20250102_000000-0000").exists()


def test_what_a_run_links_to_stays(make: Make) -> None:
    run = make()
    Path("data").mkdir()
    Path("data/precious").write_text("x")
    (run.directory / "data").symlink_to("../../../data")
    assert clean(*EVERYTHING) == 0
    assert not run.directory.exists()
    assert Path("data/precious").exists()


@pytest.mark.parametrize(
    "name", ["../elsewhere/night", "..", ".", "", "/", "night/", f"night/{RUN_ID}", "linked", "{cwd}/elsewhere/night"]
)
def test_a_name_does_not_leave_the_workspace(make: Make, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    outside, inside = make(workspace="elsewhere"), make()
    Path("output/linked").symlink_to("../elsewhere/night")
    assert clean("--name", name.format(cwd=Path.cwd()), *EVERYTHING) == 2
    assert "no experiment" in capsys.readouterr().err
    assert outside.directory.exists()
    assert inside.directory.exists()


def test_a_workspace_that_is_a_link_itself_is_cleaned(make: Make) -> None:
    run = make(workspace="scratch")
    Path("output").symlink_to("scratch")
    assert clean(*EVERYTHING) == 0
    assert not run.directory.exists()


def test_a_run_that_is_executed_here_or_on_another_host_stays(make: Make) -> None:
    here, there, left = make(), make("20250102_000000-abcd"), make("20250103_000000-abcd")
    record = json.dumps({"host": "another-host", "pid": 1, "renewal": 3})
    for run in (there, left):
        (run.directory / ".lock").write_text(record)
    os.utime(left.directory / ".lock", (0, 0))
    script = (
        "import sys\nfrom pathlib import Path\nfrom primus.runs.store import Run\n"
        "with Run(Path(sys.argv[1])).hold_lock() as ours:\n    print(ours, flush=True)\n    sys.stdin.read()\n"
    )
    argv = [sys.executable, "-c", script, str(here.directory)]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout and holder.stdout.readline() == b"True\n"
        assert clean(*EVERYTHING) == 0
        holder.communicate()
    assert here.directory.exists() and there.directory.exists()
    assert not left.directory.exists(), "its holder has not renewed the record for years"
    assert lock.find_holder(here.directory) is None, "a launcher that ends in order leaves no record"


def test_a_deletion_that_was_cut_off_is_no_run_and_is_finished(make: Make, capsys: pytest.CaptureFixture[str]) -> None:
    run, kept = make(), make("20250102_000000-abcd")
    half = run.directory.rename(run.directory.with_name(f".deleted.{RUN_ID}"))
    foreign = half.with_name(".deleted.notes")
    shutil.copytree(half, foreign)
    assert main("direct -- runs list --json".split()) == 0
    assert [item["id"] for item in json.loads(capsys.readouterr().out)] == [kept.id]
    assert clean("--keep", "1", "--yes") == 0
    assert (half.exists(), foreign.exists(), kept.directory.exists()) == (False, True, True)


@pytest.mark.parametrize("private", [".", "metadata.json"])
def test_the_private_run_of_another_user_is_neither_damaged_nor_in_the_way(
    make: Make, capsys: pytest.CaptureFixture[str], private: str
) -> None:
    make("20250103_000000-0000")
    folder = make().directory
    Path.cwd().chmod(0o777)  # pytest's own folder, whose parents need no permission for relative paths
    (folder / private).chmod(0)
    with as_another_user():
        assert main(["direct", "--", "runs", "list"]) == 0
        listed = capsys.readouterr().out
        assert main(["direct", "--", "runs", "show", f"output/night/{RUN_ID}"]) in (1, 2)
        refused = capsys.readouterr().err
        assert clean("--damaged", "--keep", "0") == 0
    assert "20250103_000000-0000" in listed
    assert f"no permission to read 1 more, such as output/night/{RUN_ID}" in listed
    assert "permission denied" in refused.lower()
    assert capsys.readouterr().out.startswith("0 runs")
