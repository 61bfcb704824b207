"""Every file of examples/ is valid; the small ones train."""

from __future__ import annotations

from pathlib import Path

import pytest

from experiment_examples import EXPERIMENTS
from primus.config.checks import check_data, check_lengths, count_accumulation_steps
from primus.config.load import Resolved, load_experiment
from primus.models.counts import count_parameters
from primus.models.model_checks import check, check_parallel

EXAMPLES = [path for path in EXPERIMENTS if path.stem != "rival-8gpu"]
"""Without the one whose data and model are given by matrices of `compare run`."""
SMALL = [path for path in EXAMPLES if path.stem.endswith("-small")]
FULL = [path for path in EXAMPLES if path.stem.endswith("-pretrain")]


def load(path: Path, *overrides: str) -> Resolved:
    return load_experiment(path, overrides, environ={})


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_is_valid(path: Path) -> None:
    resolved = load(path)
    trainer = resolved.experiment.trainer
    check(trainer.model)
    check_parallel(trainer.model, trainer.parallel, trainer.training.seq_length)
    check_lengths(resolved)
    check_data(resolved)
    assert resolved.experiment.exp_name == path.stem, "runs are found under the example's name"


@pytest.mark.parametrize("processes", [1, 2, 3, 8])
def test_the_quick_start_fits_any_number_of_devices(processes: int) -> None:
    resolved = load(Path(__file__).parents[2] / "examples" / "quickstart.yaml")
    assert count_accumulation_steps(resolved, processes) == 1


@pytest.mark.parametrize("path", FULL, ids=lambda path: path.stem)
def test_a_full_size_example_is_the_published_model_on_its_devices(path: Path) -> None:
    resolved = load(path)
    devices, steps = (512, 32) if "70B" in path.stem else (8, 8)
    assert count_parameters(resolved.experiment.trainer.model).total_parameters > 6e9
    assert count_accumulation_steps(resolved, devices) == steps


def test_there_is_a_small_example_of_each_dense_family() -> None:
    families = {path.stem.partition("_")[0] for path in SMALL}
    assert families == {"llama2", "llama3", "llama3.1", "llama3.2", "qwen2.5", "qwen3"}


@pytest.mark.parametrize("path", SMALL, ids=lambda path: path.stem)
def test_a_small_example_trains_two_steps(path: Path) -> None:
    torch = pytest.importorskip("torch")
    from primus.frameworks.native.engine.model import build_model

    trainer = load(path, "--dataset=null", "--mock_data", "--seq_length=32").experiment.trainer
    model = build_model(trainer.model, "cpu", seed=trainer.training.seed)
    assert sum(weight.numel() for weight in model.parameters()) == count_parameters(trainer.model).total_parameters
    assert count_parameters(trainer.model).total_parameters < 10e6

    tokens = torch.randint(trainer.model.vocab_size, (2, trainer.training.seq_length + 1))
    scale = torch.tensor(1 / (2 * trainer.training.seq_length))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    losses = []
    for _ in range(3):
        loss = model(tokens[:, :-1], tokens[:, 1:], scale)
        losses.append(loss.item())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert losses[0] > losses[1] > losses[2]
