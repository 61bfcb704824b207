"""What `analyze speed` and `analyze scaling` show."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from primus import experiment
from primus.cli.main import main
from primus.errors import UsageError
from primus.prediction.device_rates import read_rates
from primus.prediction.format_prediction import format_prediction
from primus.prediction.measured_rates import replace_rates
from primus.prediction.prediction import find_machine, predict
from primus.prediction.scaling import (
    ScalingRequest,
    find_checkpoint_interval,
    find_useful_share,
    predict_scaling,
)

EXAMPLE = Path(__file__).parents[2] / "examples/llama3.1_8B-pretrain.yaml"


@pytest.fixture(scope="module")
def trainer() -> experiment.Trainer:
    return experiment.resolve_experiment(EXAMPLE, (), {}, is_elsewhere=True).experiment.trainer


def test_terms_sum_up_and_the_cost_follows_from_the_price(trainer: experiment.Trainer) -> None:
    found = predict(trainer, "mi300x:8", 2, price=2.0)
    assert sum(found.terms.values()) == pytest.approx(found.seconds)
    assert found.tokens_per_s_per_device == pytest.approx(found.tokens / found.seconds / 16)
    # 1e9 tokens at 10,000 tokens/s/GPU are 27.8 GPU hours (facts of cost per token).
    hours = 1e9 / found.tokens_per_s_per_device / 3600
    assert found.cost_per_billion_tokens == pytest.approx(2 * hours)
    text = format_prediction(found, explain=True)
    assert text.count(" time, ") == len(found.what_ifs) > 0
    assert "error against published rows" not in text  # none of MI300X has its whole layout
    assert "trust the order" in text


def test_a_device_with_published_rows_shows_their_error(trainer: experiment.Trainer) -> None:
    found = predict(trainer, "h100:8", 1)
    assert any("not fitted to" in text for text in found.published_errors)


def test_sizes_that_do_not_divide_are_refused(trainer: experiment.Trainer) -> None:
    odd = experiment.resolve_experiment(
        EXAMPLE, ("--tensor_model_parallel_size", "8"), {}, is_elsewhere=True
    ).experiment.trainer
    with pytest.raises(UsageError, match="12 processes cannot be laid out"):
        predict(odd, "mi300x:4", 3)


def test_the_command_prints_the_same_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["direct", "--", "analyze", "speed", "--config", str(EXAMPLE), "--assume", "mi300x:8", "--json"]
    assert main(words) == 0
    value = json.loads(capsys.readouterr().out)
    assert value["fits"] is True
    assert value["seconds"] == pytest.approx(sum(value["terms"].values()))


def test_scaling_shows_failures_and_intervals(trainer: experiment.Trainer) -> None:
    rates = read_rates(*find_machine("mi300x:8"))
    request = ScalingRequest(trainer=trainer, rates=rates, devices_of_node=8)
    points = predict_scaling(request, [1, 8, 64])
    assert [point.devices for point in points] == [8, 64, 512]
    assert points[0].efficiency == 1
    assert points[0].efficiency >= points[1].efficiency >= points[2].efficiency
    assert points[2].global_batch == 64 * points[0].global_batch
    assert points[2].failures_per_day == pytest.approx(512 * 4.7e-4)
    assert points[0].checkpoint_interval_s > points[2].checkpoint_interval_s


@pytest.mark.parametrize(("save_s", "between_s"), [(5.0, 3600.0), (60.0, 86400.0), (300.0, 7200.0)])
def test_the_interval_loses_least(save_s: float, between_s: float) -> None:
    """Against a search over intervals, with the exact model of exponential failures (Daly 2006, equation 20)."""

    def count_time(interval: float) -> float:
        return between_s * (math.exp((interval + save_s) / between_s) - 1) / interval

    best = min(count_time(between_s * number / 20000) for number in range(20, 40000))
    assert count_time(find_checkpoint_interval(save_s, between_s)) == pytest.approx(best, rel=2e-3)
    assert 0 < find_useful_share(find_checkpoint_interval(save_s, between_s), save_s, between_s) < 1


def test_the_page_of_scaling_has_charts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "scaling.html"
    words = ["direct", "--", "analyze", "scaling", "--config", str(EXAMPLE), "--assume", "mi300x:8"]
    assert main([*words, "--nnodes", "1,8", "--output", str(page)]) == 0
    assert "efficiency" in capsys.readouterr().out
    assert page.read_text().count("<svg") == 6  # each wide and narrow
    assert main([*words, "--nnodes", "1,x"]) == 2
    assert "--nnodes 1,x" in capsys.readouterr().err


def test_measured_products_replace_those_of_the_profile(tmp_path: Path) -> None:
    rates = read_rates(*find_machine("mi300x:8"))
    row = {"case": {"M": 8192, "dtype": "bf16"}, "value": 600.0, "unit": "TFLOP/s"}
    file = tmp_path / "gemm.json"
    file.write_text(
        json.dumps(
            {
                "benchmark": "gemm",
                "ranks": [{"rank": 0, "host": "a", "device": "cuda", "device_name": "MI300X", "rows": [row]}],
            }
        )
    )
    found = replace_rates(rates, [str(file)])
    assert found.tflops["bf16"] == 600
    assert found.tflops["fp8"] == rates.tflops["fp8"]
    assert "measured" in found.sources["products"]
    file.write_text(json.dumps({"benchmark": "storage"}))
    with pytest.raises(UsageError, match="are not used"):
        replace_rates(rates, [str(file)])
