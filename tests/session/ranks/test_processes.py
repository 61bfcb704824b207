"""A single process answers for all, and the first problem of several processes counts."""

from __future__ import annotations

from primus.session.ranks.processes import OneProcess, find_first_problem


def test_the_problem_of_the_lowest_rank_is_named() -> None:
    assert find_first_problem(["", "second", "third"]) == "second"
    assert find_first_problem(["", ""]) == ""


def test_one_process_exchanges_values_with_itself() -> None:
    process = OneProcess()
    assert process.is_first and process.world == 1
    assert process.all_reduce_max(2) == 2
    assert process.all_gather_values("x") == ["x"]
    assert process.broadcast_from_first("x") == "x"
