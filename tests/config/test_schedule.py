"""The evaluation interval, and the steps of warm-up and of the last phase, that follow from the configuration."""

from __future__ import annotations

import pytest

from primus.config.schedule import count_wsd_decay_steps, find_evaluation_interval, warmup_steps
from primus.config.schema import OptimizerConfig, TrainingConfig


@pytest.mark.parametrize(("num_batches", "interval"), [(0, None), (1, 50)])
def test_without_batches_nothing_is_evaluated(num_batches: int, interval: int | None) -> None:
    training = TrainingConfig(train_iters=100, eval_interval=50, eval_iters=num_batches)
    assert find_evaluation_interval(training) == interval


def test_warm_up_and_last_phase_are_shares_of_the_steps_of_the_decay() -> None:
    shorter = OptimizerConfig(lr_decay_iters=100, lr_warmup_fraction=0.5)
    assert (warmup_steps(shorter, 1000), count_wsd_decay_steps(shorter, 1000)) == (50, 10)
