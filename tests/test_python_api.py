"""`import primus` is the command line in Python: its words, its plans, its errors, and runs as tables."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import numpy
import pytest

import primus

PAGE = Path(__file__).parents[1] / "docs/python-api.md"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_importing_primus_imports_nothing_of_it_or_of_other_packages() -> None:
    code = "import sys; before = set(sys.modules); import primus; print(*sorted(set(sys.modules) - before))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.split() == ["primus"]


def test_every_name_is_there_and_has_a_type() -> None:
    stub = Path(primus.__file__).with_name("__init__.pyi").read_text()
    assert {*re.findall(r"as (\w+)$", stub, re.MULTILINE), "__version__"} == set(primus.__all__)
    assert all(getattr(primus, name) for name in primus.__all__)
    with pytest.raises(AttributeError, match="has no attribute 'opn_runs'"):
        primus.opn_runs  # type: ignore[attr-defined]  # noqa: B018


@pytest.mark.slow
@pytest.mark.native
def test_the_page_runs_as_it_stands(monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    names: dict[str, object] = {}
    for block in blocks:
        exec(compile(block, str(PAGE), "exec"), names)
    steps = names["steps"]
    assert isinstance(steps, dict) and steps["step"].tolist() == [1, 2, 3, 4]
    assert steps["loss"].dtype == float and steps["step"].dtype == int


def test_a_plan_is_what_a_dry_run_prints_and_hides_secrets(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "canary-of-the-shell")
    words = ["slurm", "sbatch", "-N", "2", "--", "direct", "--env", "MY_TOKEN=canary-typed", "--"]
    prepared = primus.prepare([*words, "train", "pretrain", "--config", "examples:quickstart"], lr=1e-4, bf16=False)
    text = f"{prepared}{prepared!r}{json.dumps(prepared.plan)}"
    assert "canary" not in text and "MY_TOKEN" in text
    assert prepared.words[-2:] == ("--lr=0.0001", "--bf16=false")
    assert not list(folder.iterdir())


@pytest.mark.parametrize(
    ("words", "error", "problem"),
    [
        ("direct -- train pretrain --config examples:quikstart", primus.UsageError, "no example 'quikstart'"),
        ("drect -- runs list", primus.UsageError, "drect"),
        ("direct --help", primus.UsageError, "prepare() needs a command with a task"),
    ],
)
def test_what_is_wrong_is_an_exception_before_anything_starts(words: str, error: type, problem: str) -> None:
    with pytest.raises(error, match=re.escape(problem)):
        primus.prepare(words)


def test_the_error_of_a_command_that_ran_is_raised_with_its_exit_code() -> None:
    with pytest.raises(primus.UsageError) as caught:
        primus.prepare("direct -- runs show nothing").run(quiet=True)
    assert (caught.value.problem, caught.value.exit_code) == ("no run 'nothing' in output", 2)
    assert caught.value.hint == "the workspace has no runs"


def test_a_command_that_still_runs_is_a_time_out_and_can_be_stopped(folder: Path) -> None:
    prepared = primus.prepare("direct --no-hooks -- config examples")
    running = prepared.start(quiet=True)
    with pytest.raises(TimeoutError, match=r"still runs after 0\.001 s"):
        running.wait(0.001)
    running.stop()
    assert not running.is_running


def write_run(folder: Path, metadata: dict[str, object], lines: str) -> Path:
    run = folder / "output/old" / str(metadata["id"])
    run.mkdir(parents=True)
    (run / "metadata.json").write_text(json.dumps(metadata))
    (run / "events.jsonl").write_text(lines)
    return run


def test_runs_of_older_versions_and_damaged_ones_are_read_as_far_as_they_go(folder: Path) -> None:
    old = {"id": "20240101_000000-0001", "name": "old", "task": "train pretrain", "created": 1.0, "gone": "field"}
    events = '{"time": 1, "kind": "step", "step": 1, "loss": 2.5}\n{"time": 2, "kind": "step", "step": 2, "lo'
    write_run(folder, old, events)
    damaged = write_run(folder, {"id": "20240102_000000-0002"}, "")
    (damaged / "metadata.json").write_text('{"id"')
    (damaged / "request.json").write_text("{}")
    runs = primus.open_runs()
    assert [row["state"] for row in runs.read_rows()] == ["died", "damaged"]
    first = runs["20240101"]
    assert first.read_steps(as_lists=True) == {"time": [1], "step": [1], "loss": [2.5]}
    assert (first.read_metadata().version, first.read_settings()) == ("", {})
    assert primus.open_run(first.directory).id == runs[0].id
    assert [run.id for run in runs[1:]] == [damaged.name] and len(primus.open_runs("output", "old")) == 2
    with pytest.raises(primus.PrimusError):
        runs[1].read_metadata()
    with pytest.raises(KeyError):
        runs["new"]


def test_steps_are_arrays_and_lists_where_numpy_is_absent(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old = {"id": "20240101_000000-0001", "name": "old", "task": "train pretrain", "created": 1.0}
    steps = ['{"time": 1, "kind": "step", "step": 1}', '{"time": 2, "kind": "step", "step": 2, "loss": 2.5}']
    write_run(folder, old, "\n".join(steps) + "\n")
    run = primus.open_run("old")
    assert numpy.isnan(run.read_steps()["loss"][0]) and run.read_steps()["step"].dtype == int
    monkeypatch.setitem(sys.modules, "numpy", None)
    assert run.read_steps()["loss"] == [None, 2.5]
