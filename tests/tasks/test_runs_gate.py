"""`runs gate` judges run folders: exit codes, baseline files, reports, and one message for each bad input."""

from __future__ import annotations

import json
import random
import re
import shlex
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from primus.cli.main import main
from primus.config.flags import parse_options
from primus.launch.command import parse_command
from primus.runs import store
from primus.runs.files import write_json
from primus.runs.snapshot import SystemInfo
from primus.runs.store import Run, RunMetadata, RunOutcome
from primus.tasks.runs.gate import Options

MakeRun = Callable[..., Run]
PAGE = Path(__file__).parents[2] / "docs" / "gate.md"
CPU = "Test CPU"


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> MakeRun:
    """Make run number `n` of an experiment, whose steps take `step_time_s`."""
    monkeypatch.chdir(tmp_path)

    def make(
        n: int, step_time_s: float = 0.2, *, steps: int = 40, loss: Any = 4.0, state: Any = "done", cpu: str = CPU
    ) -> Run:
        run_id = f"2025010{n}_000000-000{n}"
        outcome = RunOutcome(state=state, reason="out of memory" if state == "failed" else "")
        run = store.create_run(
            Path("output/night") / run_id,
            RunMetadata(id=run_id, name="night", task="train pretrain", created=float(n), outcome=outcome),
        )
        rng = random.Random(n)
        write_json(
            run.directory / "env" / "system_info.json",
            SystemInfo(
                host="h", kernel="k", architecture="x86_64", python="3.11", cpu_model=cpu, cpu_cores=2, memory_bytes=1
            ),
        )
        started = {"kind": "run_started", "step": 0, "device_type": "cpu", "device": cpu, "world_size": 1, "threads": 2}
        lines: list[dict[str, Any]] = [{**started, "parameters": 7, "seq_length": 64, "versions": {"torch": "2.13.0"}}]
        for step in range(1, steps + 1):
            time = step_time_s * (1 + rng.gauss(0, 0.005))
            lines.append({"kind": "step", "step": step, "loss": loss, "step_time_s": time, "tokens_per_s": 512 / time})
        run.events.write_text("".join(json.dumps({"time": 1.0, **line}) + "\n" for line in lines))
        return run

    return make


def call_gate(words: str) -> int:
    return main(["direct", "--", "runs", "gate", *shlex.split(words)])


def test_equal_runs_pass_and_a_slower_one_exits_with_3(make: MakeRun, capsys: pytest.CaptureFixture[str]) -> None:
    for n, time in ((1, 0.2), (2, 0.2), (3, 0.206)):
        make(n, time)
    assert call_gate("20250102 --baseline 20250101") == 0
    assert "passed" in capsys.readouterr().out
    assert call_gate("night --baseline 20250101 --junit gate.xml --json") == 3
    result = json.loads(capsys.readouterr().out)
    assert result["speed"]["verdict"] == "slower" and not result["is_passed"]
    suite = ElementTree.parse("gate.xml").getroot()[0]
    assert suite.attrib["failures"] == "1"
    assert [(case.attrib["name"], case[0].tag) for case in suite] == [
        ("tokens_per_s", "failure"),
        ("loss", "system-out"),
    ]


def test_the_name_of_the_experiment_is_its_newest_earlier_run_that_is_done(
    make: MakeRun, capsys: pytest.CaptureFixture[str]
) -> None:
    make(1)
    make(2, state="failed")
    make(3)
    assert call_gate("night --baseline night --json") == 0
    assert json.loads(capsys.readouterr().out)["baselines"] == ["20250101_000000-0001"]


def test_the_first_run_of_an_experiment_passes_without_a_comparison_unless_strict(
    make: MakeRun, capsys: pytest.CaptureFixture[str]
) -> None:
    make(1, state="failed")
    make(2)
    assert call_gate("night --baseline night") == 0
    assert "not compared: 20250102_000000-0002 is the first run of its experiment" in capsys.readouterr().out
    assert call_gate("night --baseline night --strict") == 3
    assert call_gate("night --baseline 20250102") == 2, "a run that is named as its own baseline is a mistake"


def test_another_loss_exits_with_3_unless_only_speed_counts(make: MakeRun, capsys: pytest.CaptureFixture[str]) -> None:
    make(1)
    make(2, loss=4.01)
    assert call_gate("night --baseline 20250101") == 3
    assert "differs from step 1 on, 40 of 40 steps" in capsys.readouterr().out
    assert call_gate("night --baseline 20250101 --loss-tolerance 1%") == 0
    assert call_gate("night --baseline 20250101 --loss-tolerance 0") == 3
    assert call_gate("night --baseline 20250101 --loss-tolerance off") == 0
    make(3, loss=float("nan"))
    run = store.find_run("night", Path("output"))
    run.events.write_text(run.events.read_text().replace("NaN", "null"))
    assert call_gate("night --baseline 20250101") == 3
    assert "not finite at step 1" in capsys.readouterr().out


def test_a_baseline_file_keeps_runs_by_machine_class(make: MakeRun, capsys: pytest.CaptureFixture[str]) -> None:
    make(1)
    make(2, 0.1, cpu="Other CPU")
    assert call_gate("20250101 --save-baseline base.json") == 0
    assert call_gate("20250102 --save-baseline base.json") == 0
    make(3)
    assert call_gate("night --baseline base.json --save-baseline base.json") == 0
    capsys.readouterr()
    make(4, 0.21)
    assert call_gate("night --baseline base.json --save-baseline base.json --json") == 3
    assert json.loads(capsys.readouterr().out)["baselines"] == ["20250101_000000-0001", "20250103_000000-0003"]
    kept = json.loads(Path("base.json").read_text())["runs"]
    assert len(kept) == 3, "a run that fails does not become a baseline"


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        ("night", 2, "needs --baseline or --save-baseline"),
        ("night --baseline 20250104", 2, "another machine class"),
        ("night --baseline other.json", 2, "has no baseline of night on Test CPU"),
        ("night --baseline edited.json", 1, "edited.json: damaged: run 20250101_000000-0001: column loss"),
        ("night --baseline cut.json", 1, "cut.json: damaged"),
        ("night --baseline 20250101 --metric token_per_s", 2, "did you mean 'tokens_per_s'"),
        ("night --baseline 20250101 --tolerance 300%", 2, "--tolerance 300%: not a share"),
        ("night --baseline 20250102", 1, "failed: out of memory"),
        ("night --baseline 20250103", 2, "steady steps after .* of warm-up; the gate needs 10"),
        ("night --baseline 20250105", 2, "is its own baseline"),
        ("night --baseline nigth", 2, "did you mean 'night'"),
    ],
)
def test_bad_input_is_one_message(
    make: MakeRun, capsys: pytest.CaptureFixture[str], words: str, code: int, message: str
) -> None:
    make(1)
    make(2, state="failed")
    make(3, steps=6)
    make(4, cpu="Other CPU")
    assert call_gate("20250104 --save-baseline other.json") == 0
    assert call_gate("20250101 --save-baseline edited.json") == 0
    saved = json.loads(Path("edited.json").read_text())
    saved["runs"][0]["columns"]["loss"].pop()
    Path("edited.json").write_text(json.dumps(saved))
    Path("cut.json").write_text(Path("other.json").read_text()[:200])
    make(5)
    capsys.readouterr()
    assert call_gate(words) == code
    error = capsys.readouterr().err
    assert re.search(message, error), error
    assert "Traceback" not in error


def test_profiled_steps_do_not_make_a_run_slower(make: MakeRun, capsys: pytest.CaptureFixture[str]) -> None:
    make(1)
    run = make(2)
    lines = [json.loads(line) for line in run.events.read_text().splitlines()]
    for line in lines:
        if line["kind"] == "step" and 20 <= line["step"] <= 27:
            line["tokens_per_s"] /= 3
    profile = {"time": 1.0, "kind": "profile", "first_step": 20, "last_step": 27}
    run.events.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert call_gate("night --baseline 20250101 --strict") == 3
    run.events.write_text("".join(json.dumps(line) + "\n" for line in [*lines, profile]))
    assert call_gate("night --baseline 20250101 --strict") == 0


def test_a_run_that_is_executing_is_refused(make: MakeRun, capsys: pytest.CaptureFixture[str]) -> None:
    make(1)
    run = make(2, state="running")
    with run.hold_lock():
        assert call_gate("night --baseline 20250101") == 2
    assert "is running" in capsys.readouterr().err


def test_an_undecided_gate_passes_unless_it_is_strict(make: MakeRun, capsys: pytest.CaptureFixture[str]) -> None:
    make(1)
    make(2)
    for n in (1, 2):
        run = store.find_run(f"2025010{n}", Path("output"))
        rng, lines = random.Random(n), [json.loads(line) for line in run.events.read_text().splitlines()]
        for line in lines[1:]:
            line["tokens_per_s"] *= rng.lognormvariate(0, 0.4)
        run.events.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert call_gate("night --baseline 20250101") == 0
    assert "inconclusive" in capsys.readouterr().out
    assert call_gate("night --baseline 20250101 --strict") == 3


def read_examples() -> dict[str, str]:
    sections = PAGE.read_text(encoding="utf-8").split("\n## ")[1:]
    return {
        section.splitlines()[0]: found[1]
        for section in sections
        if (found := re.search(r"```\w+\n(.*?)```", section, re.S))
    }


def list_commands(script: str) -> list[list[str]]:
    joined = re.sub(r"\\\n\s*", "", script)
    return [shlex.split(line)[1:] for line in re.findall(r"(\./primus-cli [^'\n]*)", joined)]


def test_the_examples_of_ci_services_are_valid() -> None:
    examples = read_examples()
    github, gitlab = yaml.safe_load(examples["GitHub Actions"]), yaml.safe_load(examples["GitLab"])
    github_script = "\n".join(step.get("run", "") for step in github["jobs"]["speed"]["steps"])
    assert gitlab["speed"]["artifacts"]["reports"]["junit"] == "gate.xml"
    jenkins = examples["Jenkins"]
    assert jenkins.count("{") == jenkins.count("}") and "junit 'gate.xml'" in jenkins
    for script in (github_script, "\n".join(gitlab["speed"]["script"]), jenkins):
        commands = list_commands(script)
        gates = [command[4:] for command in commands if "gate" in command]
        assert len(commands) == 2 and len(gates) == 1
        for command in commands:
            parse_command(command)
        options, _ = parse_options(Options, gates[0], "runs gate")
        assert options.junit == "gate.xml" and options.baseline
