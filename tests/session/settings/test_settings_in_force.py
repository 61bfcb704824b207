"""What an engine has after its first step is recorded beside what was asked for, and a dropped setting ends the run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from fakes.bigram_engine import train_bigrams
from fakes.training_runs import write_training_run
from primus import experiment
from primus.callback import StepReport
from primus.errors import UsageError
from primus.runs import events
from primus.runs.attempt import Attempt
from primus.runs.settings_in_force import SettingInForce, read_settings_in_force
from primus.runs.store import Run
from primus.session.settings.settings_in_force import LiveSetting, judge_clipping, judge_settings

SETTINGS: dict[str, Any] = {
    "mock_data": True,
    "seq_length": 32,
    "train_iters": 3,
    "micro_batch_size": 2,
    "global_batch_size": 4,
    "disable_tensorboard": True,
}
MakeRun = Callable[..., Run]


@pytest.fixture
def make_run(tmp_path: Path) -> MakeRun:
    return partial(write_training_run, tmp_path, SETTINGS)


def train(run: Run, *live: LiveSetting) -> None:
    with closing(Attempt(run, 0)) as attempt:
        train_bigrams(experiment.read_run_experiment(run), attempt, live=live)


def read_recorded(run: Run) -> dict[str, SettingInForce]:
    return {each.key: each for each in read_settings_in_force(events.read_events(run.events))}


def count_steps(run: Run) -> int:
    return len(events.read_steps(run.events))


def test_a_setting_that_the_engine_dropped_ends_the_run_after_its_first_step(make_run: MakeRun) -> None:
    run = make_run(seq_length=64)
    dropped = LiveSetting(key="seq_length", value=32)
    with pytest.raises(UsageError) as refused:
        train(run, dropped, LiveSetting(key="weight_decay", value=0.1))
    assert refused.value.exit_code == 2
    assert "a setting is not in force in numpy" in refused.value.problem
    assert refused.value.problem.endswith("seq_length: asked 64, in force 32"), "no setting that is in force"
    assert "--allow_settings_not_in_force true" in refused.value.hint
    assert count_steps(run) == 1
    assert read_recorded(run)["seq_length"].state == "not in force"


def test_a_value_that_nobody_wrote_is_asked_for_by_its_default(make_run: MakeRun) -> None:
    with pytest.raises(UsageError, match="recompute_activations: asked false, in force true"):
        train(make_run(), LiveSetting(key="recompute_activations", value=True))


def test_several_settings_are_named_together(make_run: MakeRun) -> None:
    live = [LiveSetting(key="adam_beta1", value=0.5), LiveSetting(key="bf16", value="bfloat16, float32")]
    with pytest.raises(UsageError) as refused:
        train(make_run(), *live)
    assert "2 settings are not in force" in refused.value.problem
    assert "adam_beta1: asked 0.9, in force 0.5; bf16: asked true, in force bfloat16, float32" in refused.value.problem


def test_a_switch_lets_the_run_go_on_and_the_difference_is_recorded(
    make_run: MakeRun, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_run(allow_settings_not_in_force=True)
    train(run, LiveSetting(key="weight_decay", value=0.0))
    assert count_steps(run) == 3
    assert read_recorded(run)["weight_decay"].state == "not in force"
    assert "note: a setting is not in force" in capsys.readouterr().out


def test_a_reason_of_the_engine_explains_a_difference_and_is_recorded(make_run: MakeRun) -> None:
    run = make_run(sequence_parallel=True)
    train(run, LiveSetting(key="sequence_parallel", value=False, reason="one process"))
    recorded = read_recorded(run)["sequence_parallel"]
    assert (recorded.asked, recorded.in_force, recorded.state, recorded.reason) == (
        True,
        False,
        "explained",
        "one process",
    )
    assert count_steps(run) == 3


def test_the_learning_rate_of_the_first_step_is_that_of_the_schedule(make_run: MakeRun) -> None:
    settings = {"lr": 0.8, "lr_warmup_iters": 2, "lr_decay_iters": 3}
    train(make_run("right", **settings), LiveSetting(key="learning_rate", value=0.4))
    with pytest.raises(UsageError, match=r"learning_rate: asked 0\.4, in force 0\.8"):
        train(make_run("wrong", **settings), LiveSetting(key="learning_rate", value=0.8))


@pytest.mark.parametrize(
    ("asked", "live", "state", "in_force"),
    [
        (0.1, LiveSetting(key="k", value=0.1 * (1 + 1e-7)), "as asked", 0.1),
        (0.1, LiveSetting(key="k", value=0.1 * (1 + 1e-4)), "not in force", 0.1 * (1 + 1e-4)),
        (0.1, LiveSetting(key="k", value=0.1 * (1 + 1e-4), tolerance=1e-3), "as asked", 0.1),
        (True, LiveSetting(key="k", value="selective"), "not in force", "selective"),
        ("auto", LiveSetting(key="k", value=True), "explained", True),
        (None, LiveSetting(key="k", value=7), "explained", 7),
        ([1, 2], LiveSetting(key="k", value=[1, 2]), "as asked", [1, 2]),
        ("fused", LiveSetting(key="k", value="for-loop"), "not in force", "for-loop"),
    ],
)
def test_a_value_is_judged_by_what_was_asked_for(asked: Any, live: LiveSetting, state: str, in_force: Any) -> None:
    (found,) = judge_settings([live], {"k": asked})
    assert (found.state, found.in_force) == (state, in_force)


def test_a_setting_of_the_engine_is_asked_for_by_its_path(make_run: MakeRun) -> None:
    (found,) = judge_settings([LiveSetting(key="optimizer.implementation", value="fused")], {})
    assert found.state == "not asked"


@pytest.mark.parametrize(
    ("limit", "norm", "applied", "found"),
    [
        (1.0, 4.0, 1.0, [1.0]),
        (1.0, 4.0, 4.0, [0.0]),
        (1.0, 4.0, 2.0, [2.0]),
        (1.0, 0.5, 0.5, []),
        (0.0, 4.0, 4.0, [0.0]),
        (0.0, 4.0, 1.0, [1.0]),
    ],
)
def test_the_gradient_that_the_optimizer_got_shows_the_limit_of_its_norm(
    limit: float, norm: float, applied: float, found: list[float]
) -> None:
    live = [LiveSetting(key="applied_grad_norm", value=applied)]
    assert [each.value for each in judge_clipping(live, limit, make_report(norm))] == found


def make_report(norm: float, **changes: Any) -> StepReport:
    values: Mapping[str, Any] = {
        "step": 1, "loss": 1.0, "grad_norm": norm, "learning_rate": 1.0, "tokens": 1, "consumed_samples": 1,
        "global_batch_size": 1, "step_time_s": 1.0, "data_time_s": 0.0, "tokens_per_s": 1.0,
        "tokens_per_s_per_device": 1.0, "tflops_per_device": 1.0, "mfu": None, "memory_gib": 1.0, "skipped": False,
    }  # fmt: skip
    return StepReport(**{**values, **changes})


def test_a_skipped_step_shows_no_limit() -> None:
    live = [LiveSetting(key="applied_grad_norm", value=4.0)]
    assert judge_clipping(live, 1.0, make_report(4.0, skipped=True)) == []


class RecordedWatch:
    """Counts the steps between its beginning and its end."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def __enter__(self) -> None:
        self.calls.append("begin")

    def __exit__(self, *exception: object) -> None:
        self.calls.append("end")


def test_only_the_first_step_is_watched_and_read(make_run: MakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    watch = RecordedWatch()
    monkeypatch.setattr("fakes.bigram_engine.BigramEngine.watch_step", lambda engine: watch)

    def read(engine: Any) -> list[LiveSetting]:
        watch.calls.append(f"read after {engine.steps}")
        return []

    monkeypatch.setattr("fakes.bigram_engine.BigramEngine.read_settings", read)
    train(make_run())
    assert watch.calls == ["begin", "end", "read after 1"]
