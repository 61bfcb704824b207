"""Profiles of a window of steps: the traces of each rank, the event that names them, and times without the writing."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from typing import Any

import pytest

from primus import experiment
from primus.errors import UsageError
from primus.frameworks import native
from primus.runs import events
from primus.runs.store import Run

pytest.importorskip("torch")
MakeRun = Callable[..., Run]


def read_profile(run: Run) -> dict[str, Any]:
    (found,) = [event for event in events.read_events(run.events) if event["kind"] == "profile"]
    return found


def read_names(run: Run, file: str) -> list[str]:
    with gzip.open(run.directory / file) as text:
        return [event.get("name", "") for event in json.load(text)["traceEvents"]]


def test_a_profile_has_the_steps_of_its_window_and_waits_for_data(make_run: MakeRun, train: Callable[..., Any]) -> None:
    run = make_run(profile="steps=2:3", profile_memory=True, train_iters=4)
    train(run)
    found = read_profile(run)
    assert (found["first_step"], found["last_step"], found["ranks"]) == (2, 3, [0])
    names = read_names(run, found["files"][0])
    assert [name for name in names if name.startswith("ProfilerStep#")] == ["ProfilerStep#2", "ProfilerStep#3"]
    assert names.count("data") == 2
    assert {"aten::mm", "[memory]"} <= set(names)
    third, fourth = events.read_steps(run.events)[2:]
    between = fourth["time"] - third["time"] - fourth["step_time_s"]
    assert between > 0.9 * found["time_s"], "the time of writing belongs to no step"
    assert not list(run.directory.glob("profiles/**/.partial*"))


def test_keys_of_megatron_choose_the_same_steps_and_the_last_step_ends_a_window(
    make_run: MakeRun, train: Callable[..., Any]
) -> None:
    run = make_run(profile=True, profile_step_start=3, profile_step_end=9, torch_profiler_use_gzip=False, train_iters=4)
    train(run)
    found = read_profile(run)
    assert (found["first_step"], found["last_step"]) == (3, 4)
    assert (run.directory / found["files"][0]).name == "rank_0.steps_3-4.json"


def test_each_chosen_rank_records_its_own_trace(make_run: MakeRun, start_workers: Callable[..., Any]) -> None:
    run = make_run(profile="2", profile_ranks="1,0", train_iters=3, global_batch_size=4)
    assert start_workers(run, world=2).wait() == [0, 0]
    found = read_profile(run)
    assert [file.rpartition("/")[2] for file in found["files"]] == [
        "rank_0.steps_2-2.json.gz",
        "rank_1.steps_2-2.json.gz",
    ]
    for rank, file in enumerate(found["files"]):
        with gzip.open(run.directory / file) as text:
            assert json.load(text)["distributedInfo"]["rank"] == rank


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"profile": "steps=5"}, "step 5 is past the last step of the run, 4"),
        ({"profile": "steps=3:2"}, "steps 3 to 2: the range is empty"),
        ({"profile": "five"}, "not a range of steps: 'five'"),
        ({"profile": True, "profile_ranks": "x", "profile_step_start": 1}, "not a list of ranks: 'x'"),
    ],
)
def test_a_window_that_cannot_be_recorded_is_refused_before_anything_starts(
    make_run: MakeRun, settings: dict[str, Any], problem: str
) -> None:
    with pytest.raises(UsageError, match=problem):
        native.check(experiment.read_run_experiment(make_run(train_iters=4, **settings)))
