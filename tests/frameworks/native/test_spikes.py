"""A loss spike is found on the device, and its beginning on the host."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch

from primus.callback import StepReport
from primus.config.schema import TrainingConfig
from primus.frameworks.native.engine.spikes import LossWindow
from primus.session.bad_steps import BadStepDetector, BadSteps, find_spike_begin

CPU = torch.device("cpu")
NOISE = [3.0, 3.1, 2.9, 3.05, 2.95, 3.02, 2.98, 3.01]
"""Median 3.0 (the lower one), median absolute deviation 0.02: a standard deviation of 0.03."""


def taken(window: LossWindow, losses: Sequence[float]) -> list[bool]:
    return [bool(window.add_loss(torch.tensor(loss))) for loss in losses]


def test_a_loss_far_above_the_ones_before_it_is_a_spike() -> None:
    window = LossWindow(8, 6.0, CPU)
    assert taken(window, [*NOISE, 3.9]) == [False] * 8 + [True]


def test_the_threshold_is_the_median_and_a_number_of_standard_deviations() -> None:
    deviation = 1.4826 * 0.02
    assert taken(LossWindow(8, 6.0, CPU), [*NOISE, 3.0 + 6 * deviation - 0.001])[-1] is False
    assert taken(LossWindow(8, 6.0, CPU), [*NOISE, 3.0 + 6 * deviation + 0.001])[-1] is True


def test_nothing_is_a_spike_before_the_window_is_full() -> None:
    assert not any(taken(LossWindow(8, 6.0, CPU), [*NOISE[:7], 100.0]))


def test_a_low_loss_and_losses_that_are_not_finite_are_no_spikes() -> None:
    assert not any(taken(LossWindow(8, 6.0, CPU), [*NOISE, 0.5, math.nan, math.inf]))


def test_a_loss_that_is_not_finite_does_not_enter_the_window() -> None:
    window = LossWindow(8, 6.0, CPU)
    assert taken(window, [*NOISE, math.nan, math.inf, 3.9])[-1] is True


def test_a_spike_does_not_hide_the_next_one_and_a_new_level_stops_being_one() -> None:
    found = taken(LossWindow(8, 6.0, CPU), [*NOISE, 9.0, *[8.5 + 0.1 * (index % 3) for index in range(8)]])
    assert found[8:11] == [True] * 3
    assert not any(found[8 + 5 :]), "half a window later it is the usual loss"


def test_losses_that_do_not_vary_have_no_spikes() -> None:
    assert not any(taken(LossWindow(8, 6.0, CPU), [2.0] * 10 + [2.1]))


def test_a_window_that_is_put_back_decides_as_the_one_that_took_the_losses() -> None:
    original, restored = LossWindow(8, 6.0, CPU), LossWindow(8, 6.0, CPU)
    taken(original, [5.0, 4.0, *NOISE])
    restored.replace([4.0, *NOISE])
    following = [3.17, 3.18, 3.2, 3.4, 3.0, 9.0]
    assert taken(original, following) == taken(restored, following)
    shorter = LossWindow(8, 6.0, CPU)
    shorter.replace(NOISE[:5])
    assert taken(shorter, [*NOISE[5:], 9.0]) == [False, False, False, True]


def test_a_spike_begins_where_the_loss_had_begun_to_rise() -> None:
    before = list(enumerate([*NOISE, 3.3, 3.4], start=1))
    assert find_spike_begin(11, before, 6.0) == 9
    assert find_spike_begin(9, before[:8], 6.0) == 9, "the noise before it is none of it"


# What follows


def report(step: int, loss: float = 3.0, skipped: bool = False, spike: bool = False) -> StepReport:
    return StepReport(
        step=step,
        loss=loss,
        grad_norm=1.0,
        learning_rate=0.1,
        tokens=8,
        consumed_samples=2 * step,
        global_batch_size=2,
        step_time_s=1.0,
        data_time_s=0.0,
        tokens_per_s=8.0,
        tokens_per_s_per_device=8.0,
        tflops_per_device=1.0,
        mfu=None,
        memory_gib=1.0,
        skipped=skipped,
        spike=spike,
    )


@pytest.mark.parametrize("policy", ["rewind", "stop"])
def test_a_spike_raises_under_the_policies_rewind_and_stop(policy: str) -> None:
    watch = watching(loss_spike_policy=policy)
    with pytest.raises(BadSteps, match=r"step 9: a loss spike: 9.0000, after a median of 3.0000 in the last 8") as bad:
        watch.after_report(report(9, 9.0, skipped=True, spike=True))
    assert bad.value.answer == policy and bad.value.first == 9 and bad.value.last.consumed_samples == 18


def test_a_skipped_spike_has_no_consequences() -> None:
    watch = watching(loss_spike_policy="skip", max_nonfinite_steps=1)
    watch.after_report(report(9, 9.0, skipped=True, spike=True))
    assert watch.losses == [*NOISE[1:], 9.0]


@pytest.mark.parametrize(
    ("policy", "limit", "answer"), [("skip", 3, "stop"), ("rewind", 3, "rewind"), ("stop", 1, "stop")]
)
def test_steps_that_are_not_finite_are_skipped_until_there_are_too_many(policy: str, limit: int, answer: str) -> None:
    watch = watching(nonfinite_policy=policy, max_nonfinite_steps=3)
    for step in range(9, 9 + limit - 1):
        watch.after_report(report(step, math.nan, skipped=True))
    with pytest.raises(BadSteps, match="the loss or the gradient is not finite") as bad:
        watch.after_report(report(9 + limit - 1, math.nan, skipped=True))
    assert (bad.value.answer, bad.value.first) == (answer, 9)


def test_a_finite_loss_with_a_gradient_that_is_not_is_in_the_window_of_host_and_device() -> None:
    window = LossWindow(8, 6.0, CPU)
    watch = watching(window, loss_spike_policy="skip")
    window.add_loss(torch.tensor(3.3))
    watch.after_report(report(9, 3.3, skipped=True))
    assert watch.losses == [*NOISE[1:], 3.3]
    assert window._losses.tolist() == pytest.approx(watch.losses)


def watching(window: LossWindow | None = None, **settings: object) -> BadStepDetector:
    config = TrainingConfig(loss_spike_window=8, **settings)  # type: ignore[arg-type]
    if window is None and config.loss_spike_policy != "none":
        window = LossWindow(8, config.loss_spike_factor, CPU)
    watch = BadStepDetector(config, window)
    watch.restart_after(8, NOISE)
    if window is None:
        watch._recent.extend(enumerate(NOISE, start=1))
    return watch
