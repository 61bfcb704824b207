"""Runs that take turns: one takes steps while the others wait, whatever becomes of one of them."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from primus.runs.step_turns import Turn, TurnGiver, TurnWaiter, give_turns


def never() -> bool:
    return False


@pytest.fixture
def folders(tmp_path: Path) -> list[Path]:
    found = [tmp_path / "a", tmp_path / "b"]
    for folder in found:
        folder.mkdir()
    return found


def take_steps(name: str, waiter: TurnWaiter, steps: int, taken: list[tuple[str, int]], ended: threading.Event) -> None:
    number = 0
    for _ in range(steps):
        turn = waiter.wait()
        number = turn.number if turn else number
        taken.append((name, number))
    ended.set()


def test_runs_take_turns_of_which_each_round_begins_with_the_next_and_the_longer_one_finishes_alone(
    folders: list[Path],
) -> None:
    givers, ends = [TurnGiver(folder) for folder in folders], [threading.Event(), threading.Event()]
    taken: list[tuple[str, int]] = []
    threads = [
        threading.Thread(target=take_steps, args=(name, TurnWaiter(folder, never), steps, taken, end))
        for name, folder, steps, end in zip("ab", folders, (4, 7), ends, strict=True)
    ]
    for thread in threads:
        thread.start()
    give_turns([(giver, end.is_set) for giver, end in zip(givers, ends, strict=True)], 2, time.monotonic() + 30)
    for thread in threads:
        thread.join(10)
    assert "".join(name for name, _ in taken) == "aabb" + "bbaa" + "bbb"
    assert [number for name, number in taken if name == "b"] == [1, 1, 2, 2, 3, 3, 4]


def test_a_process_that_is_started_again_gets_a_turn_of_its_own(folders: list[Path]) -> None:
    giver = TurnGiver(folders[0])
    TurnWaiter(folders[0], never)  # died before it read its turn
    giver.give(Turn(1, 5))
    second = TurnWaiter(folders[0], never)
    answers: list[Turn | None] = []
    thread = threading.Thread(target=lambda: answers.append(second.wait()))
    thread.start()
    assert giver.wait_until_ready(never, time.monotonic() + 10)
    giver.give(Turn(2, 1))
    thread.join(10)
    assert answers == [Turn(2, 1)]


def test_a_signal_and_the_end_of_the_comparison_end_the_wait(folders: list[Path]) -> None:
    givers = [TurnGiver(folder) for folder in folders]
    assert TurnWaiter(folders[0], lambda: True).wait() is None
    assert not givers[0].wait_until_ready(lambda: True, time.monotonic() + 10), "its run has ended"
    waiter = TurnWaiter(folders[1], never)
    thread = threading.Thread(target=waiter.wait)
    thread.start()
    assert givers[1].wait_until_ready(never, time.monotonic() + 10)
    givers[1].close()
    thread.join(10)
    assert not thread.is_alive()
    assert TurnWaiter(folders[1], never).wait() is None, "nobody gives turns any more"
