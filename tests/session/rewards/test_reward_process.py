"""Rewards come from a process of their own, whatever a plug-in does there."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from primus import registry
from primus.errors import FinalError
from primus.reward import REWARDS
from primus.session.rewards.reward_process import CompletionToScore, RewardProcess

OWN = '''"""Does what the completion says."""

import os
import time


def reward(prompt, completion, row):
    print("a line of a plug-in")
    if completion == "hang":
        time.sleep(600)
    if completion == "exit":
        os._exit(7)
    if completion == "text":
        return "much"
    if completion == "long":
        raise ValueError("x" * 100_000)
    if completion == "secret":
        return float("PRIMUS_TEST_TOKEN" in os.environ)
    return {"nan": float("nan"), "one": 1}[completion]
'''


@pytest.fixture
def open_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., RewardProcess]]:
    (tmp_path / "rewards").mkdir()
    (tmp_path / "rewards" / "own.py").write_text(OWN)
    monkeypatch.setenv("PRIMUS_PLUGINS", str(tmp_path))
    monkeypatch.setenv("PRIMUS_TEST_TOKEN", "s3cret-value-of-a-test")
    found: list[RewardProcess] = []

    def open_one(on_error: str, names: tuple[str, ...] = ("own",)) -> RewardProcess:
        found.append(RewardProcess(list(names), 1.0, on_error, r"\d+"))
        return found[-1]

    yield open_one
    for each in found:
        each.close()


def ask(*completions: str) -> list[CompletionToScore]:
    return [CompletionToScore("p", each, {"answer": "one"}) for each in completions]


def test_a_reward_that_fails_counts_as_0_and_the_others_keep_theirs(open_process: Callable[..., Any]) -> None:
    process, beats = open_process("zero", ("own", "exact")), []
    asked = ask("one", "text", "nan", "exit", "hang", "other", "long", "secret", *["one"] * 40)
    found = process.score(asked, lambda: beats.append(0))
    assert [each.rewards["own"] for each in found] == [1.0, *[0.0] * 7, *[1.0] * 40]
    assert [each.rewards["exact"] for each in found] == [1.0, *[0.0] * 7, *[1.0] * 40]
    problems = [" ".join(each.problems) for each in found]
    assert "returned str, not float" in problems[1]
    assert problems[2:5] == [
        "reward own: returned nan",
        "reward own: its process ended with code 7",
        "reward own: no value within reward_timeout_s 1",
    ]
    assert "KeyError: 'other'" in problems[5] and "own.py:" in problems[5]
    assert "ValueError: xxx" in problems[6] and len(problems[6]) < 400
    assert not any(problems[7:]), "the process has no variables with secrets"
    assert len(beats) == 2 * len(asked)


def test_a_reward_that_fails_stops_the_run_with_its_name_and_the_prompt(open_process: Callable[..., Any]) -> None:
    with pytest.raises(FinalError, match=r"reward own: returned nan \(prompt 'p', completion 'nan'\)"):
        open_process("stop").score(ask("one", "nan"), lambda: None)


@pytest.mark.parametrize(
    ("name", "completion", "row", "expected"),
    [
        ("exact", " 12\n", {"answer": 12}, 1),
        ("exact", "12.", {"answer": "12"}, 0),
        ("final_number", "so 3 + 4 is 1,000.", {"answer": "steps\n#### 1000"}, 1),
        ("final_number", "1000 or 7", {"answer": "1000"}, 0),
        ("final_number", "none", {"answer": "1000"}, 0),
        ("format", " <a>1</a> ", {"reward_pattern": "<a>.*</a>"}, 1),
        ("format", "x <a>1</a>", {"reward_pattern": "<a>.*</a>"}, 0),
        ("json_object", '{"a": 1, "b": 2}', {"answer": {"a": 0}}, 1),
        ("json_object", '{"b": 2}', {"answer": {"a": 0}}, 0),
        ("json_object", "[1]", {}, 0),
        ("json_object", "{", {}, 0),
    ],
)
def test_rewards_of_the_package(name: str, completion: str, row: dict[str, Any], expected: int) -> None:
    found = registry.load_plug_in(REWARDS, name).reward("p", completion, row)
    assert found == expected and math.isfinite(found)
