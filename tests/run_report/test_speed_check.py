"""A run beside its prediction and published rows."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest

pytest.importorskip("numpy")

from primus.run_report.markdown import format_text
from primus.run_report.report import build_report
from primus.runs.files import to_json, write_text
from primus.runs.store import Run

MakeRun = Callable[..., Run]
SETTINGS = {"seq_length": 8192, "micro_batch_size": 1, "global_batch_size": 128, "mock_data": True}


def make_8b_run(make_run: MakeRun, seconds: float, device: str, **overrides: object) -> Run:
    """A run of Llama 3 8B on eight devices of that speed."""
    tokens = 128 * 8192
    run = make_run(
        [(seconds, 0.0)] * 30,
        started={"device": device, "device_type": "cuda", "world_size": 8},
        tokens_per_s=tokens / seconds,
    )
    module = {"framework": "native", "model": "llama3_8B.yaml", "overrides": SETTINGS | overrides}
    write_text(run.config, to_json({"exp_name": "test", "modules": {"pre_trainer": module}}))
    return run


def test_a_run_stands_beside_its_prediction_and_the_gap_is_divided(make_run: MakeRun) -> None:
    report = build_report(make_8b_run(make_run, 14.0, "NVIDIA H100 80GB HBM3"))
    assert report.speed is not None
    assert sum(report.speed.terms.values()) == pytest.approx(report.speed.predicted_s)
    assert 0.5 < report.speed.ratio < 2
    (row,) = [each for each in report.speed.published if each.tokens_per_s_per_device == 14451]
    assert row.ratio == pytest.approx(14451 / (128 * 8192 / 14.0 / 8))
    factors = {each.setting: each.factor for each in row.settings}
    assert factors["precision"] > 1.2
    assert math.prod(factors.values()) * row.unexplained == pytest.approx(row.ratio)
    text = format_text(report)
    assert "Predicted step" in text
    assert "14,451 tokens/s of a device" in text


def test_a_run_on_a_cpu_or_an_unknown_device_has_no_prediction(make_run: MakeRun) -> None:
    assert build_report(make_8b_run(make_run, 14.0, "EPYC 9654")).speed is None


def test_a_device_without_peaks_has_no_prediction(make_run: MakeRun) -> None:
    assert build_report(make_8b_run(make_run, 14.0, "NVIDIA H800")).speed is None
