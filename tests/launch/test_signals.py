"""Which of several signals counts, whatever the order in which their handlers get to run."""

from __future__ import annotations

import signal
import time

import pytest

from primus.launch.signals import INSISTS_AFTER_S, TOGETHER_S, StopSignals


@pytest.mark.parametrize("numbers", [(signal.SIGUSR1, signal.SIGTERM), (signal.SIGTERM, signal.SIGUSR1)])
def test_sigusr1_counts_if_it_arrives_together_with_sigterm(numbers: tuple[int, int]) -> None:
    with StopSignals() as signals:
        assert signals.first_signal is None
        for number in numbers:
            signal.raise_signal(number)
    assert signals.first_signal == signal.SIGUSR1
    assert signals.is_urgent
    assert not signals.insists


def test_otherwise_the_first_signal_counts() -> None:
    with StopSignals() as signals:
        signal.raise_signal(signal.SIGTERM)
        time.sleep(2 * TOGETHER_S)
        signal.raise_signal(signal.SIGUSR1)
    assert signals.first_signal == signal.SIGTERM


@pytest.mark.parametrize(("number", "insists"), [(signal.SIGTERM, True), (signal.SIGUSR1, False)])
def test_repeating_sigterm_insists_and_repeating_sigusr1_does_not(number: int, insists: bool) -> None:
    with StopSignals() as signals:
        signal.raise_signal(number)
        assert not signals.insists
        time.sleep(INSISTS_AFTER_S + 0.1)
        signal.raise_signal(number)
    assert signals.insists is insists
