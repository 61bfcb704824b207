"""Two runs compared: which difference can explain another speed, and which another loss."""

from __future__ import annotations

from collections.abc import Callable

import pytest

pytest.importorskip("numpy")

from primus.run_report.comparison import compare_runs
from primus.runs.store import Run

MakeRun = Callable[..., Run]
OTHER = "20231114_221320-0001"
NOISY = [(1.0 + 0.01 * (number % 5), 0.1) for number in range(40)]
FASTER = [(0.8 + 0.01 * (number % 7), 0.1) for number in range(40)]


def test_the_only_difference_that_can_change_the_speed_explains_it(make_run: MakeRun) -> None:
    a = make_run(NOISY, settings={"compile": False, "lr": 1e-3})
    b = make_run(FASTER, settings={"compile": True, "lr": 2e-3}, name=OTHER)
    found = compare_runs(a, b)
    assert found.speed is not None
    assert found.speed.is_real
    assert found.speed.ratio == pytest.approx(1.02 / 0.83, rel=0.02)
    assert "the only difference that can change the speed is compile (False -> True)" in found.speed_explanation
    assert "equal bit by bit" in found.loss_explanation
    assert {each.what: each.effects for each in found.candidates} == {"compile": ["speed"], "lr": ["loss"]}


def test_several_differences_are_candidates_and_noise_is_no_difference(make_run: MakeRun) -> None:
    a = make_run(NOISY, settings={"micro_batch_size": 1}, started={"world_size": 1})
    same = make_run(NOISY[1:] + NOISY[:1], settings={"micro_batch_size": 1}, started={"world_size": 1}, name=OTHER)
    assert "no difference beyond the noise of the steps" in compare_runs(a, same).speed_explanation
    both = make_run(
        FASTER, settings={"micro_batch_size": 2}, started={"world_size": 2}, name=OTHER[:-1] + "2", loss=1.0
    )
    found = compare_runs(a, both)
    assert (
        "2 differences can change the speed: micro_batch_size (1 -> 2), world_size (1 -> 2)" in found.speed_explanation
    )
    assert "the losses differ from step 1 on" in found.loss_explanation
    assert "the only difference that can change the loss is micro_batch_size" in found.loss_explanation


def test_the_device_that_trained_is_a_difference(make_run: MakeRun) -> None:
    a = make_run(NOISY, started={"device": "AMD Instinct MI300X"})
    b = make_run(FASTER, started={"device": "NVIDIA H100"}, name=OTHER)
    explanation = compare_runs(a, b).speed_explanation
    assert "the only difference that can change the speed is device (AMD Instinct MI300X -> NVIDIA H100)" in explanation


def test_runs_without_steps_are_compared_by_what_they_have(make_run: MakeRun) -> None:
    found = compare_runs(make_run([]), make_run(NOISY, name=OTHER))
    assert (found.speed, found.speed_explanation) == (None, "one of the runs has no steps")
    assert found.loss_explanation == "the runs have no steps in common"
