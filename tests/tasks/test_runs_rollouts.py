"""`runs rollouts` shows the completions of a step, from all processes in their order."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from primus.cli.main import main
from primus.runs.rollouts import Rollout, write_rollouts
from primus.runs.store import RunMetadata, create_run

ID = "20260101_120000-abcd"


def make_rollout(number: int) -> Rollout:
    return Rollout(
        number=number,
        row=1,
        prompt="1+1=",
        completion="2\n" * 40,
        tokens=[3, 4],
        log_probabilities=[-0.5, -0.25],
        length=2,
        stop_reason="stop",
        rewards={"exact": 0.0, "format": 1.0},
        reward=0.2,
        advantage=-1.0,
    )


def test_rollouts_of_a_step_are_a_table_or_json(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    metadata = RunMetadata(id=ID, name="rl", task="train rl", created=1.0)
    run = create_run(Path("output") / "rl" / ID, metadata)
    for rank in (1, 0):
        write_rollouts(run, 7, rank, [make_rollout(2 * n + rank) for n in range(2)])
    assert main(["direct", "--", "runs", "rollouts", "rl", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["step"] == 7
    assert [each["number"] for each in found["rollouts"]] == [0, 1, 2, 3]
    assert found["rollouts"][0]["log_probabilities"] == [-0.5, -0.25]
    assert main(["direct", "--", "runs", "rollouts", "rl", "--step", "7"]) == 0
    header, first, *others = capsys.readouterr().out.splitlines()
    assert header.split() == "number row prompt completion exact format reward advantage tokens stop".split()
    assert r"2\n2\n" in first and "..." in first and len(others) == 3
    assert main(["direct", "--", "runs", "rollouts", "rl", "--step", "8"]) == 2
    assert "no rollouts of step 8\n  steps with rollouts: 7 to 7" in capsys.readouterr().err
