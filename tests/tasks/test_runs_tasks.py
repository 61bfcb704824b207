"""Runs are listed, shown, compared and cleaned, whatever state their writers left them in."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from primus.cli.main import main
from primus.runs import store
from primus.runs.store import RankFailure, Run, RunMetadata, RunOutcome

Make = Callable[..., Run]
DAY_S = 86400.0


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Make:
    """Make run number `n` of an experiment, with events and a checkpoint."""
    monkeypatch.chdir(tmp_path)

    def make(
        n: int, name: str = "night", state: Any = "done", age_days: float = 0.0, losses: tuple[float, ...] = ()
    ) -> Run:
        run_id = f"2025010{n}_000000-000{n}"
        created = time.time() - age_days * DAY_S
        code = {"done": 0, "failed": 1, "interrupted": 143}.get(state)
        failure = RankFailure(rank=3, host="node7", time=1.0, problem="bang", log="logs/attempt_0/rank_3.log")
        outcome = RunOutcome(
            state=state, exit_code=code, reason="bang" * bool(code), first_failure=failure if code else None
        )
        metadata = RunMetadata(
            id=run_id,
            name=name,
            task="train pretrain",
            command=["direct", "--", "train"],
            created=created,
            started=created,
            ended=created + 90 if code is not None else None,
            attempts=1,
            outcome=outcome,
        )
        run = store.create_run(Path("output") / name / run_id, metadata)
        lines = [
            {"time": created + step, "kind": "step", "step": step, "loss": loss, "tokens_per_s": 1000.0 * step}
            for step, loss in enumerate(losses, start=1)
        ]
        lines += [{"time": created, "kind": "eval", "step": len(losses), "loss": 9.5}] if losses else []
        run.events.write_text("".join(json.dumps(line) + "\n" for line in lines))
        (run.checkpoints / "step_00000002").mkdir(parents=True)
        (run.checkpoints / "step_00000002" / "manifest.json").write_text("{}")
        (run.checkpoints / "step_00000003").mkdir()
        return run

    return make


def run_task(words: str, capsys: pytest.CaptureFixture[str]) -> Any:
    """What the task prints; as JSON where that is asked for."""
    assert main(["direct", "--", *words.split()]) == 0
    out = capsys.readouterr().out
    return json.loads(out) if "--json" in words else out


def tree(folder: Path) -> list[tuple[str, float]]:
    return sorted((str(path), path.lstat().st_mtime) for path in folder.rglob("*"))


def test_runs_in_every_state_are_listed(make: Make, capsys: pytest.CaptureFixture[str]) -> None:
    make(1, losses=(5.0, 4.0, 3.0, 2.5, 2.25))
    make(2, state="failed")
    make(3, state="interrupted", name="day")
    make(4, state="running", losses=(5.0,))
    make(5, state="planned")
    (make(6).directory / "metadata.json").write_text("{ half")
    make(7).events.unlink()
    (make(8).directory / "events.jsonl").write_bytes(
        b'{"kind": "step"}\n\xff\xfe\n{"time": 1, "kind": "step", "step": 1}\n{"ti'
    )
    with make(9, state="running").hold_lock():
        listed = run_task("runs list --json", capsys)
    states = ["done", "failed", "interrupted", "died", "died", "damaged", "done", "done", "running"]
    assert [item["state"] for item in listed] == states
    first = listed[0]
    assert (first["steps"], first["last_loss"], first["eval_loss"], first["tokens_per_s"]) == (5, 2.25, 9.5, 4500.0)
    assert (first["checkpoints"], first["duration_s"]) == (1, 90.0)
    assert (listed[5]["name"], listed[7]["steps"], listed[7]["last_loss"]) == ("night", 1, None)

    text = run_task("runs list", capsys)
    assert text.splitlines()[0].split() == "run experiment state steps loss eval loss tokens/s time size".split()
    assert [line.split()[2] for line in text.splitlines()[1:]] == [*states[:-1], "died"]
    assert "1:30" in text.splitlines()[1]


def test_looking_changes_nothing(make: Make, capsys: pytest.CaptureFixture[str]) -> None:
    for n, state in enumerate(["done", "running", "failed"], start=1):
        make(n, state=state, age_days=10)
    before = tree(Path("output"))
    for words in (
        "runs list",
        "runs show night",
        "runs diff 20250101 20250102",
        "runs clean --failed",
        "runs clean --keep 1",
    ):
        run_task(words, capsys)
    assert tree(Path("output")) == before


def test_only_one_experiment_is_listed_where_it_is_named(make: Make, capsys: pytest.CaptureFixture[str]) -> None:
    make(1)
    make(2, name="day")
    assert [item["name"] for item in run_task("runs list --name day --json", capsys)] == ["day"]
    assert run_task("runs list --name none", capsys) == "no runs in ./output\n"


def test_a_run_is_shown_with_what_was_asked_and_how_it_ended(make: Make, capsys: pytest.CaptureFixture[str]) -> None:
    run = make(1, state="failed", losses=(5.0, 4.0))
    text = run_task(f"runs show {run.id[:10]}", capsys)
    for line in (
        "state:         failed, exit code 1",
        "reason:        bang",
        "first failure: rank 3 on node7, see logs/attempt_0/rank_3.log",
        "command:       primus-cli direct -- train",
        "loss:          4 (evaluation 9.5)",
    ):
        assert line in text
    value = run_task("runs show night --json", capsys)
    assert (value["metadata"]["id"], value["summary"]["state"], value["last_steps"][-1]["loss"]) == (
        run.id,
        "failed",
        4.0,
    )


def test_a_damaged_run_is_shown_as_one_message(make: Make, capsys: pytest.CaptureFixture[str]) -> None:
    (make(1).directory / "metadata.json").write_text("{ half")
    assert main("direct -- runs show night".split()) == 1
    assert "metadata.json: damaged: " in capsys.readouterr().err


def test_a_moved_folder_is_the_same_run(make: Make, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    run = make(1, losses=(5.0,))
    before = run_task("runs show night --json", capsys)["summary"]
    shutil.move(str(run.directory), tmp_path / "elsewhere")
    after = run_task("runs show elsewhere --json", capsys)["summary"]
    assert {**after, "id": "", "directory": ""} == {**before, "id": "", "directory": ""}


def test_losses_are_compared_by_how_much_they_differ(make: Make, capsys: pytest.CaptureFixture[str]) -> None:
    make(1, losses=(8.0, 0.5, 4.0, None, 1.0, 2.0))
    make(2, losses=(8.0, 0.25, 3.5, None, None, 2.0))
    found = run_task("runs diff 20250101 20250102 --json", capsys)["losses"]
    assert found == {
        "common_steps": 6,
        "different_steps": 3,
        "first_step": 2,
        "first_absolute": 0.25,
        "max_absolute": 0.5,
        "max_absolute_step": 3,
        "max_relative": 0.5,
        "max_relative_step": 2,
    }
    same = run_task("runs diff 20250101 20250101 --json", capsys)["losses"]
    assert (same["different_steps"], same["first_step"], same["max_absolute"]) == (0, None, None)


def test_a_run_shows_the_command_that_opens_its_curves(make: Make, capsys: pytest.CaptureFixture[str]) -> None:
    run = make(1)
    assert "tensorboard:" not in run_task("runs show night", capsys)
    (run.directory / "tensorboard").mkdir()
    line = next(line for line in run_task("runs show night", capsys).splitlines() if line.startswith("tensorboard: "))
    words = shlex.split(line)[1:]
    assert words[1:] == ["-m", "tensorboard.main", "--logdir", str(run.directory / "tensorboard")]
    assert Path(words[0]).samefile(sys.executable)


def test_a_comparison_names_what_differs_and_where_losses_part(make: Make, capsys: pytest.CaptureFixture[str]) -> None:
    a, b = make(1, losses=(5.0, 4.0, 3.0)), make(2, losses=(5.0, 4.0, 3.5, 3.0))
    for run, lr in ((a, 0.1), (b, 0.2)):
        (run.directory / "config").mkdir()
        config = {
            "exp_name": "night",
            "env": {"A": "1"},
            "modules": {"pre_trainer": {"overrides": {"lr": lr, "seed": 1}}},
        }
        run.config.write_text(json.dumps(config))
        (run.directory / "env").mkdir()
        (run.directory / "env/primus_env_dump.txt").write_text(
            f"X={lr}  # --env\nSAME=1  # --env\nSHELL={lr}  # shell\n"
        )
        (run.directory / "env/packages.txt").write_text(f"torch=={lr}\nnumpy==2\n")
    value = run_task("runs diff 20250101 20250102 --json", capsys)
    assert value["configuration"] == [{"what": "lr", "a": 0.1, "b": 0.2}]
    assert value["environment"] == [{"what": "X", "a": "0.1", "b": "0.2"}]
    assert value["packages"] == [{"what": "torch", "a": "0.1", "b": "0.2"}]
    verdict = (
        "differ on 1 of 3 common steps, from step 3 on (by 0.5); at most by 0.5 (step 3), relatively 0.143 (step 3)"
    )
    assert value["results"][-1] == {"what": "losses", "a": verdict, "b": ""}
    text = run_task("runs diff 20250101 20250102", capsys)
    assert "configuration:\n" in text
    assert verdict in text
    assert "equal bit by bit on all 3 common steps" in run_task("runs diff 20250101 20250101", capsys)
    assert "losses" in run_task("runs diff night 20250101_000000-0001", capsys)


def test_a_comparison_shows_hidden_values_that_differ_and_none_that_cannot_be_compared(
    make: Make, capsys: pytest.CaptureFixture[str]
) -> None:
    hidden = {"SAME": ("aaaa-0000000001", "aaaa-0000000001"), "OTHER": ("aaaa-0000000001", "aaaa-0000000002")}
    hidden |= {"OTHER_KEY": ("aaaa-0000000001", "bbbb-0000000002")}
    for number, run in enumerate((make(1), make(2))):
        (run.directory / "env").mkdir()
        lines = [f"{name}=<hidden {values[number]}>  # --env\n" for name, values in hidden.items()]
        (run.directory / "env/primus_env_dump.txt").write_text("".join(lines))
    found = run_task("runs diff 20250101 20250102 --json", capsys)["environment"]
    assert found == [{"what": "OTHER", "a": "<hidden aaaa-0000000001>", "b": "<hidden aaaa-0000000002>"}]


def left() -> set[str]:
    return {path.name[7:8] for path in Path("output").glob("*/2025*")}


@pytest.mark.parametrize(
    ("words", "kept"),
    [
        ("--failed", "1569"),
        ("--keep 1", "48569"),
        ("--keep 2", "3456789"),
        ("--keep 9", "123456789"),
        ("--keep 0", "56"),
        ("--older-than-days 5", "3456789"),
        ("--failed --older-than-days 5", "13456789"),
        ("--failed --keep 1 --name night", "1456789"),
        ("--name day --keep 1", "12348569"),
        ("--older-than-days 0.0001", "569"),
        ("--older-than-days 0.0001 --damaged", "12346789"),
    ],
)
def test_only_what_is_asked_for_is_deleted(
    make: Make, capsys: pytest.CaptureFixture[str], words: str, kept: str
) -> None:
    make(1, age_days=9)
    make(2, state="failed", age_days=9)
    make(3, state="interrupted", age_days=1)
    make(4, state="running", age_days=1)
    (make(5, name="hurt", age_days=1).directory / "metadata.json").write_text("")
    os.utime(Path("output/hurt/20250105_000000-0005"), (0, 0)) if "0.0001" in words else None
    active = make(6, name="busy", state="running", age_days=9)
    make(7, name="day", state="failed", age_days=1)
    make(8, name="day", state="failed", age_days=1)
    make(9, name="new", state="done")
    with active.hold_lock():
        listed = run_task(f"runs clean {words}", capsys)
        assert left() == set("123456789"), "the first look deletes nothing"
        deleted = run_task(f"runs clean {words} --yes", capsys)
    assert left() == set(kept)
    assert listed.count("would delete") == deleted.count("deleted ") == 9 - len(kept)
    assert ("--yes deletes them" in listed) == (len(kept) < 9)


def test_latest_follows_what_is_left(make: Make, capsys: pytest.CaptureFixture[str]) -> None:
    make(1)
    make(2, state="failed")
    run_task("runs clean --failed --yes", capsys)
    assert os.readlink("output/night/latest") == "20250101_000000-0001"
    run_task("runs clean --older-than-days 1e-12 --yes", capsys)
    assert not os.path.lexists("output/night/latest")


def test_a_run_shows_which_settings_are_in_force(make: Make, capsys: pytest.CaptureFixture[str]) -> None:
    run = make(1, losses=(1.0,))
    rows = [
        {"key": "lr", "asked": 0.1, "in_force": 0.1, "state": "as asked"},
        {"key": "attention_kernel", "in_force": "Softmax", "state": "not asked"},
        {"key": "compile", "asked": "auto", "in_force": False, "state": "explained", "reason": "short run"},
        {"key": "bf16", "asked": True, "in_force": False, "state": "not in force"},
    ]
    with run.events.open("a") as file:
        file.write(json.dumps({"time": 1.0, "kind": "settings_in_force", "step": 1, "settings": rows}) + "\n")
    assert main(["direct", "--", "runs", "show", run.id]) == 0
    shown = capsys.readouterr().out
    table = shown[shown.index("settings in force") :].split("\n\n")[0].splitlines()
    assert table[0] == "settings in force after the first step; 1 others are as asked"
    assert [line.split() for line in table[2:]] == [
        ["bf16", "true", "false", "not", "in", "force"],
        ["compile", "auto", "false", "short", "run"],
        ["attention_kernel", "Softmax"],
    ]
    assert main(["direct", "--", "runs", "show", run.id, "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["settings_in_force"]) == 4


def test_a_run_of_an_earlier_version_shows_no_settings_in_force(make: Make, capsys: pytest.CaptureFixture[str]) -> None:
    run = make(1, losses=(1.0,))
    with run.events.open("a") as file:
        file.write(json.dumps({"time": 1.0, "kind": "settings_in_force", "settings": [{"name": "x"}]}) + "\n")
    assert main(["direct", "--", "runs", "show", run.id]) == 0
    assert "in force" not in capsys.readouterr().out
