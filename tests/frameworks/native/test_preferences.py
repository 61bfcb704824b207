"""Training on preferences: values that are known, gradients, the reference, and a plain computation of every loss."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.data.instruction.test_instruction_data import write_tokenizer

from primus import experiment
from primus.config.extended_files import load_model
from primus.config.schema import DataConfig, OptimizerConfig
from primus.data.instruction.dataset import COUNTED, EXAMPLE, TOKENS, open_instruction_datasets
from primus.data.instruction.pairs import parse_pair
from primus.data.instruction.preference_settings import FORMULAS, PreferenceSettings
from primus.errors import UsageError
from primus.frameworks import native
from primus.frameworks.native.engine.batch import to_batch
from primus.frameworks.native.engine.model import Transformer, build_model
from primus.frameworks.native.engine.optimizer import build_optimizer
from primus.frameworks.native.engine.post_training.preferences import METRICS, PreferenceLoss, count_pairs
from primus.frameworks.native.engine.step import evaluate_batches, prepare_model, train_step
from primus.runs import events
from primus.runs.store import Run

CPU = torch.device("cpu")
STEP_3 = "step_00000003"
SPEC = load_model("tiny.yaml")
BETA = {"dpo": 0.3, "ipo": 0.3, "orpo": 0.5, "simpo": 2.5}


def open_samples(folder: Path, *, packed: bool = True) -> np.ndarray:
    """All samples of the first epoch [N, 3, S + 1] of six pairs."""
    if not (folder / "tok").exists():
        write_tokenizer(folder / "tok")
    rows = [{"prompt": f"{n}+1?", "chosen": "x" * (n + 1), "rejected": "y" * (7 - n)} for n in range(6)]
    (folder / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = DataConfig(
        sft_data_path=str(folder / "pairs.jsonl"),
        data_path=str(folder),
        tokenizer_model=str(folder / "tok"),
        packed_sequence=packed,
        split="100,0,0",
    )
    found = open_instruction_datasets(data, 512, 63, 1, are_pairs=True).train
    return np.stack([found[number] for number in range(found.samples_per_epoch)])


def build(kind: str, **settings: Any) -> tuple[Transformer, PreferenceLoss]:
    model = build_model(SPEC, "cpu", 1)
    model.objective = objective = PreferenceLoss(PreferenceSettings(loss=kind, **settings), CPU)
    return model, objective


def score(model: Transformer, objective: PreferenceLoss, samples: np.ndarray) -> torch.Tensor:
    objective.reference_E, objective.is_scoring = torch.zeros(12, dtype=torch.float64), True
    with torch.no_grad():
        tokens, targets, examples = to_batch(samples, None, CPU)
        model(tokens, targets, None, examples)
    objective.is_scoring = False
    return objective.reference_E


def compute_plainly(model: Transformer, samples: np.ndarray) -> dict[int, tuple[torch.Tensor, int]]:
    """Log-probability and number of tokens of each answer by its number, each example by itself."""
    found = {}
    for sample in samples:
        for number in sorted(set(sample[EXAMPLE]) - {0}):
            place = sample[EXAMPLE] == number
            tokens, counted = torch.tensor(sample[TOKENS, place]), torch.tensor(sample[COUNTED, place]).bool()
            hidden = model(tokens[None, :-1])[0]
            logs = (hidden @ model.output_weight.T).log_softmax(1).gather(1, tokens[1:, None])[:, 0]
            found[int(number) - 1] = (logs[counted[1:]].double().sum(), int(counted[1:].sum()))
    return found


def compute_loss_plainly(kind: str, scores: dict, reference: dict) -> torch.Tensor:
    beta, losses = BETA[kind], []
    for pair in range(6):
        (c, num_c), (r, num_r) = scores[2 * pair], scores[2 * pair + 1]
        (c0, _), (r0, _) = reference[2 * pair], reference[2 * pair + 1]
        if kind == "dpo":
            losses.append(-torch.log(torch.sigmoid(beta * ((c - c0) - (r - r0)))))
        elif kind == "ipo":
            losses.append(((c - c0) / num_c - (r - r0) / num_r - 1 / (2 * beta)) ** 2)
        elif kind == "simpo":
            losses.append(-torch.log(torch.sigmoid(beta * (c / num_c - r / num_r) - 1.0)))
        else:
            odds = [torch.exp(mean) / (1 - torch.exp(mean)) for mean in (c / num_c, r / num_r)]
            losses.append(-c / num_c - beta * torch.log(torch.sigmoid(torch.log(odds[0] / odds[1]))))
    return torch.stack(losses).mean()


@pytest.mark.parametrize("kind", BETA)
def test_losses_and_weights_of_steps_are_those_of_a_plain_computation(kind: str, tmp_path: Path) -> None:
    samples = open_samples(tmp_path)
    model, objective = build(kind, beta=BETA[kind])
    plain = build_model(SPEC, "cpu", 1)
    reference = {key: (value.detach(), size) for key, (value, size) in compute_plainly(plain, samples).items()}
    objective.reference_E = score(model, objective, samples)
    trainable = prepare_model(model, device="cpu")
    trainable = replace(trainable, count=count_pairs)
    optimizer, others = build_optimizer(model, OptimizerConfig()), build_optimizer(plain, OptimizerConfig())
    for _ in range(4):
        # Each sample is a micro batch: the mean is over the pairs of all.
        batches = [to_batch(sample[None], None, CPU) for sample in samples]
        found = train_step(trainable, optimizer, batches, learning_rate=1e-3, clip_grad=0.0)
        expected = compute_loss_plainly(kind, compute_plainly(plain, samples), reference)
        assert found.loss == pytest.approx(expected.item(), abs=1e-5)
        assert found.num_tokens == 6
        others.zero_grad()
        expected.backward()
        for group in others.param_groups:
            group["lr"] = 1e-3
        others.step()
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.allclose(one, other, atol=1e-5)


def test_the_first_loss_is_known_where_the_model_is_its_reference(tmp_path: Path) -> None:
    samples = open_samples(tmp_path)
    for kind, expected in (("dpo", math.log(2)), ("ipo", 1 / (4 * 0.1**2))):
        model, objective = build(kind)
        objective.reference_E = score(model, objective, samples)
        trainable = prepare_model(model, device="cpu")
        trainable = replace(trainable, count=count_pairs)
        loss, pairs = evaluate_batches(trainable, [to_batch(samples, None, CPU)])
        assert pairs == 6
        assert loss / pairs == pytest.approx(expected, rel=1e-6)


def test_packed_pairs_have_the_scores_of_single_ones(tmp_path: Path) -> None:
    (packed, single) = (open_samples(tmp_path, packed=each) for each in (True, False))
    assert len(packed) < len(single) == 6
    model, objective = build("dpo")
    together = score(model, objective, packed)
    assert torch.allclose(together, score(model, objective, single), atol=1e-5)
    assert torch.equal(together, score(model, objective, packed[::-1].copy())), "by their numbers, in any order"


def test_accuracy_and_margins_of_pairs_rise(tmp_path: Path) -> None:
    samples = open_samples(tmp_path)
    model, objective = build("dpo")
    objective.reference_E = score(model, objective, samples)
    trainable = prepare_model(model, device="cpu")
    trainable = replace(trainable, count=count_pairs)
    optimizer, found = build_optimizer(model, OptimizerConfig()), []
    for _ in range(20):
        train_step(trainable, optimizer, [to_batch(samples, None, CPU)], learning_rate=1e-3, clip_grad=1.0)
        *sums, count = objective.take_metrics().tolist()
        assert count == 6
        found.append(dict(zip(METRICS, sums, strict=True)))
    assert found[0]["margin"] == pytest.approx(0.0, abs=1e-4)
    assert found[-1]["accuracy"] == 6 and found[-1]["margin"] > 1
    assert found[-1]["margin"] == pytest.approx(found[-1]["reward_chosen"] - found[-1]["reward_rejected"], abs=1e-9)


@pytest.mark.parametrize("keeps_reference", [True, False], ids=["stored reference", "computed again"])
def test_a_run_resumes_with_the_losses_and_metrics_of_an_uninterrupted_one(
    tmp_path: Path, make_run: Callable[..., Run], train: Callable[..., Any], keeps_reference: bool
) -> None:
    open_samples(tmp_path)
    settings = {
        "mock_data": False,
        "sft_data_path": str(tmp_path / "pairs.jsonl"),
        "data_path": str(tmp_path / "data"),
        "tokenizer_model": str(tmp_path / "tok"),
        "packed_sequence": True,
        "loss": "dpo",
        "split": "50,50,0",
        "seq_length": 64,
        "train_iters": 6,
        "save_interval": 3,
        "eval_interval": 3,
        "eval_iters": 1,
        "sample_tokens": 0,
        "global_batch_size": 4,
    }
    whole, resumed = make_run("whole", **settings), make_run("resumed", **settings)
    train(whole)
    shutil.copytree(whole.checkpoints / STEP_3, resumed.checkpoints / STEP_3)
    [stored] = (tmp_path / "data" / "instruction").glob("reference-*.npy")
    if not keeps_reference:
        stored.unlink()
    train(resumed)
    for kind in ("step", "preferences"):
        one, other = (
            [drop_times(event) for event in events.read_events(run.events) if event["kind"] == kind]
            for run in (whole, resumed)
        )
        assert other == [event for event in one if event["step"] > 3]
    accuracy = [event["accuracy"] for event in events.read_events(whole.events) if event["kind"] == "preferences"]
    assert accuracy[0] == 0.0 and accuracy[-1] == 1.0


def drop_times(event: events.Event) -> dict[str, Any]:
    kept = ("kind", "data", "step", "loss", "grad_norm", *METRICS)
    return {name: value for name, value in event.items() if name in kept}


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({"loss": "dpq"}, "loss"),
        ({"beta": 0.2}, "beta: the loss is sft"),
        ({"loss": "dpo", "beta": 0}, "beta"),
        ({"loss": "dpo"}, "no pairs of answers are named"),
        (
            {"loss": "dpo", "sft_data_path": "x", "mock_data": False, "context_parallel_size": 2},
            "context_parallel_size",
        ),
    ],
)
def test_a_wrong_setting_of_preferences_is_refused(
    make_run: Callable[..., Run], given: dict[str, Any], problem: str
) -> None:
    with pytest.raises(UsageError, match=problem):
        native.check(experiment.read_run_experiment(make_run("wrong", **given)))


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ({"prompt": "a", "chosen": "b", "rejected": "b"}, "chosen equals rejected"),
        ({"prompt": " ", "chosen": "b", "rejected": "c"}, "the prompt is empty"),
        ({"prompt": "a", "chosen": "", "rejected": "c"}, "an answer is empty"),
        ({"prompt": "a", "chosen": "b", "rejected": [{"role": "assistant", "content": "c"}]}, "neither all texts nor"),
        ({"prompt": "a", "completion": "b"}, "not a pair of answers"),
        (
            {"chosen": [{"role": "user", "content": "b"}], "rejected": [{"role": "user", "content": "c"}]},
            "prompt is empty",
        ),
    ],
)
def test_a_row_from_which_nothing_is_preferred_is_refused(row: dict[str, Any], problem: str) -> None:
    with pytest.raises(UsageError, match=problem):
        parse_pair(row, "pairs.jsonl:1")


def test_a_prompt_of_two_conversations_is_what_they_begin_with() -> None:
    asked = [{"role": "user", "content": "a"}]
    answers = [[{"role": "assistant", "content": text}] for text in "bc"]
    pair = parse_pair({"chosen": asked + answers[0], "rejected": asked + answers[1]}, "x:1")
    assert pair == (asked, *answers)


def test_every_loss_names_its_paper() -> None:
    assert set(FORMULAS) == set(BETA)
    assert all("arXiv" in each.paper for each in FORMULAS.values())
