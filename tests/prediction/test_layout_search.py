"""The layout that is chosen for a model on machines."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from msgspec import structs

from primus import experiment
from primus.config.extended_files import load_model
from primus.errors import UsageError
from primus.machine.profile import format_typed_name, load_all_profiles
from primus.prediction.layout_request import FitRequest, build_request
from primus.prediction.layout_search import (
    LayoutRequest,
    choose_layout,
    explain_loss,
    find_smallest_cluster,
)
from primus.prediction.step_layout import build_layout
from primus.tasks.config._fit import format_fitted_file

BATCH = 4_194_304


def make_request(model: str, machine: str, engine: str | None = None) -> LayoutRequest:
    return build_request(load_model(model), model, FitRequest(machine, 1, BATCH, engine))[0]


def fit(model: str, request: FitRequest) -> str:
    """The file, or why there is none."""
    try:
        return format_fitted_file(model, request)
    except UsageError as error:
        return f"{error.problem}; {error.hint}"


def read_back(text: str, tmp_path: Path) -> experiment.Experiment:
    """What `config check` makes of the file."""
    file = tmp_path / "fitted.yaml"
    file.write_text(text)
    return experiment.resolve_experiment(file, (), {}).experiment


@pytest.mark.parametrize(
    ("model", "machine", "nodes"),
    [
        ("llama3.1_8B", "mi300x:8", 1),
        ("llama3.1_70B", "mi300x:8", 64),
        ("qwen3_30B_A3B", "h100:8", 2),
        ("deepseek_v3", "mi355x:8", 32),
        ("gpt_oss_20B", "b200:8", 3),
    ],
)
def test_a_fitted_file_passes_the_check_and_fits(model: str, machine: str, nodes: int, tmp_path: Path) -> None:
    started = time.perf_counter()
    text = format_fitted_file(model, FitRequest(machine, nodes, BATCH, None))
    assert time.perf_counter() - started < 30
    trainer = read_back(text, tmp_path).trainer
    request = make_request(model, machine)
    layout = build_layout(trainer, nodes * request.devices_of_node)
    best = choose_layout(request, nodes).fitting[0]
    assert layout == best.layout
    assert 0.8 * BATCH <= trainer.training.seq_length * (trainer.training.global_batch_size or 0) <= 1.25 * BATCH
    assert "Runners-up" in text
    assert text.count("% slower") == 3


def test_every_layout_that_fits_is_slower_than_the_first() -> None:
    choice = choose_layout(make_request("llama3.1_70B", "mi300x:8"), 8)
    rates = [each.tokens_per_s for each in choice.fitting]
    assert rates == sorted(rates, reverse=True)
    assert all(each.memory.total <= choice.limit_bytes for each in choice.fitting)
    assert len({each.layout for each in choice.fitting}) == len(choice.fitting) > 10
    assert "slower" in explain_loss(choice.fitting[0], choice.fitting[-1])


def test_a_model_that_does_not_fit_names_the_smallest_cluster() -> None:
    with pytest.raises(UsageError, match=r"llama3.1_405B does not fit 1 x mi300x:8.*GiB of the .* GiB") as error:
        format_fitted_file("llama3.1_405B", FitRequest("mi300x:8", 1, BATCH, None))
    nodes = int(error.value.hint.rpartition(" ")[2])
    request = make_request("llama3.1_405B", "mi300x:8")
    assert choose_layout(request, nodes).fitting
    assert not choose_layout(request, nodes - 1).fitting


def test_a_model_that_fits_nowhere_says_so() -> None:
    request = make_request("llama3.1_405B", "mi300x:1")
    small = structs.replace(request, rates=structs.replace(request.rates, memory_bytes=4 << 30))
    assert find_smallest_cluster(small, 0) is None


def test_an_engine_that_cannot_train_the_model_says_why() -> None:
    with pytest.raises(UsageError, match="does not support layers of kind M"):
        format_fitted_file("mamba_370M", FitRequest("mi355x:8", 1, BATCH, "native"))


def test_a_device_without_figures_names_them() -> None:
    with pytest.raises(UsageError, match="gh200 lacks memory_bytes"):
        format_fitted_file("llama3.1_8B", FitRequest("gh200:4", 1, BATCH, None))


@pytest.mark.slow
def test_presets_on_profiles_give_a_file_or_the_smallest_cluster() -> None:
    """A sample of presets, devices and numbers of nodes."""
    models = ("llama3.2_1B", "llama2_13B", "mixtral_8x7B", "qwen2.5_72B")
    devices = [
        profile
        for profile in load_all_profiles()
        if profile.memory_bytes and profile.peaks.get("bf16") and profile.memory_gb_per_s
    ]
    assert len(devices) > 12
    for index, profile in enumerate(devices):
        model = models[index % len(models)]
        gpus = max(profile.server_sizes, default=8)
        machine = f"{format_typed_name(profile)}:{gpus}"
        said = fit(model, FitRequest(machine, 1 + index % 4, BATCH, None))
        assert "tokens/s/GPU" in said or ("does not fit" in said and ("--nnodes" in said or "no cluster" in said))
