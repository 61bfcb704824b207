"""Cells that took turns: what a machine does to both cancels, and what differs between processes does not."""

from __future__ import annotations

import random

from primus.comparison.speed.cell_statistics import RatioEstimate, compare_times
from primus.comparison.speed.turn_ratio import TurnSeries, compare_turns, group_by_turn

STEPS, TURN_STEPS = 150, 2


def simulate(rng: random.Random, factor: float, runs: int = 3) -> tuple[list[dict[int, float]], ...]:
    """Times of the steps of two cells on a machine whose speed wanders by several percent and stalls."""
    sides: tuple[list[dict[int, float]], ...] = ([], [])
    for _ in range(runs):
        machine, own = rng.gauss(0, 0.03), [rng.gauss(0, 0.002) for _ in sides]
        times: list[dict[int, float]] = [{}, {}]
        for step in range(1, STEPS + 1):
            machine = 0.97 * machine + rng.gauss(0, 0.01)
            for side in (0, 1):
                stall = 1.5 if rng.random() < 0.02 else 1.0
                speed = 0.1 * (factor if side else 1.0)
                times[side][step] = speed * (1 + machine + own[side] + rng.gauss(0, 0.02)) * stall
        for side in (0, 1):
            sides[side].append(times[side])
    return sides


def compare(a: list[dict[int, float]], b: list[dict[int, float]]) -> RatioEstimate:
    turns = {step: 1 + (step - 1) // TURN_STEPS for step in range(1, STEPS + 1)}
    ours, theirs = ([group_by_turn(f"group {n}", turns, run) for n, run in enumerate(side)] for side in (a, b))
    found = compare_turns(ours, theirs)
    assert found is not None
    return found


def test_turns_show_a_difference_that_the_runs_themselves_do_not() -> None:
    rng = random.Random("turns")
    found = {"equal": 0, "slower": 0, "slower, without turns": 0}
    for _ in range(20):
        a, b = simulate(rng, 1.0)
        found["equal"] += compare(a, b).is_difference
        a, b = simulate(rng, 1.03)
        found["slower"] += compare(a, b).is_difference
        alone = compare_times(a, b)
        found["slower, without turns"] += alone is not None and alone.is_difference
    assert found["equal"] <= 1 and found["slower"] >= 18 and found["slower, without turns"] <= 15, found


def test_the_ratio_is_that_of_times_and_says_what_it_cannot_show() -> None:
    a, b = simulate(random.Random(1), 1.2)
    found = compare(a, b)
    assert 1.18 < found.low < 1.2 < found.high < 1.22 and "pairs of turns in 3 runs" in found.method
    # One run of each cell: small differences may be the luck of a process.
    a, b = simulate(random.Random(2), 1.01, runs=1)
    one = compare(a, b)
    assert not one.is_difference and one.smallest_difference >= 0.015


def test_runs_without_a_partner_are_not_paired() -> None:
    run = TurnSeries(group="x", times={turn: [0.1, 0.1] for turn in range(20)})
    alone = TurnSeries(group="", times={})
    other = TurnSeries(group="y", times=run.times)
    assert compare_turns([run], [run]) is not None
    assert compare_turns([run], [other]) is None and compare_turns([run, other], [run, alone]) is None
    assert compare_turns([run], [TurnSeries(group="x", times={1: [0.1, 0.1]})]) is None, "too few turns"
