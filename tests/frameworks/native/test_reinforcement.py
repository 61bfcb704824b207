"""Reinforcement learning: losses by hand, rollouts that are repeated bit by bit, and rewards that rise."""

from __future__ import annotations

import json
import math
import signal
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.data.instruction.test_instruction_data import write_tokenizer

from primus import experiment
from primus.config.extended_files import load_model
from primus.data.instruction.policy_settings import POLICY_FORMULAS, PolicySettings
from primus.data.instruction.prompts import PromptDataset, Schedule, parse_prompt
from primus.errors import FinalError, UsageError
from primus.frameworks import native
from primus.frameworks.native.engine.loss import IGNORED
from primus.frameworks.native.engine.model import build_model
from primus.frameworks.native.engine.reinforcement.policy_loss import PolicyLoss, RolloutBatch, compute_advantages
from primus.frameworks.native.engine.reinforcement.rollout_report import EVENT, WINDOW, find_alarms
from primus.runs import events
from primus.runs.rollouts import read_rollouts
from primus.runs.store import Run

CPU = torch.device("cpu")
LENGTHS = (3, 1, 4, 2)
REWARDS = (1.0, 0.0, 0.5, 0.5)
CLIP = {"grpo": (0.2, 0.2), "dapo": (0.2, 0.28), "dr_grpo": (0.2, 0.2), "gspo": (3e-4, 4e-4)}
BETA = 0.3
MOST_TOKENS = 5
SETTINGS = {
    "mock_data": False,
    "loss": "grpo",
    "seq_length": 16,
    "num_generations": 4,
    "max_new_tokens": 6,
    "rewards": {"exact": 1.0, "letters": 0.5},
    "micro_batch_size": 4,
    "global_batch_size": 8,
    "train_iters": 6,
    "save_interval": 3,
    "async_save": False,
    "eval_iters": 0,
    "lr": 1e-3,
}
LETTERS = """'Share of letters.'


def reward(prompt, completion, row):
    return sum(map(str.isalpha, completion)) / 9
"""


def compute_loss_by_hand(
    kind: str, new: list[list[float]], old: list[list[float]], reference: list[list[float]]
) -> float:
    """The mean over completions as the papers write it, in floats of Python."""
    mean, deviation = statistics.mean(REWARDS), statistics.stdev(REWARDS)
    low, high = CLIP[kind]
    total = 0.0
    for reward, n, o, r in zip(REWARDS, new, old, reference, strict=True):
        advantage = reward - mean if kind == "dr_grpo" else (reward - mean) / (deviation + 1e-4)
        ratios = [math.exp(a - b) for a, b in zip(n, o, strict=True)]
        if kind == "gspo":
            ratios = [math.exp(sum(a - b for a, b in zip(n, o, strict=True)) / len(n))] * len(n)
        terms = [
            -min(ratio * advantage, min(max(ratio, 1 - low), 1 + high) * advantage)
            + BETA * (math.exp(c - a) - (c - a) - 1)
            for ratio, a, c in zip(ratios, n, r, strict=True)
        ]
        total += sum(terms) / {"dapo": 1, "dr_grpo": MOST_TOKENS}.get(kind, len(n))
    return total / (sum(LENGTHS) if kind == "dapo" else len(LENGTHS))


@pytest.mark.parametrize("kind", POLICY_FORMULAS)
def test_a_loss_is_that_of_a_computation_by_hand(kind: str) -> None:
    draw = torch.Generator().manual_seed(1)
    new, old, reference = (
        [(-2 + 0.3 * torch.randn(length, generator=draw, dtype=torch.float64)).tolist() for length in LENGTHS]
        for _ in range(3)
    )
    loss = PolicyLoss(kind, PolicySettings(kl_beta=BETA, max_new_tokens=MOST_TOKENS), CPU)
    row = torch.repeat_interleave(torch.arange(4), torch.tensor(LENGTHS))
    flat = [torch.tensor([x for part in each for x in part], dtype=torch.float64) for each in (new, old, reference)]
    advantages = compute_advantages(
        torch.tensor([REWARDS], dtype=torch.float64), POLICY_FORMULAS[kind].is_scaled
    ).flatten()
    found = loss.compute_loss(*flat, advantages, row)
    targets = torch.full((4, 6), IGNORED)
    for place, length in enumerate(LENGTHS):
        targets[place, 1 : 1 + length] = 7
    mean = found.item() / loss.count_units((targets, targets)).item()
    assert mean == pytest.approx(compute_loss_by_hand(kind, new, old, reference), abs=1e-12)


@pytest.mark.parametrize("kind", POLICY_FORMULAS)
def test_the_first_update_has_ratio_1_and_the_gradient_of_the_log_probabilities(kind: str) -> None:
    model = build_model(load_model("tiny.yaml"), "cpu", 1)
    model.objective = loss = PolicyLoss(kind, PolicySettings(kl_beta=0.0, max_new_tokens=MOST_TOKENS), CPU)
    tokens = torch.randint(0, 512, (4, 7), generator=torch.Generator().manual_seed(2))
    targets = torch.full((4, 6), IGNORED)
    for place, length in enumerate(LENGTHS):
        targets[place, 1 : 1 + length] = tokens[place, 2 : 2 + length]
    advantages = compute_advantages(
        torch.tensor([REWARDS], dtype=torch.float64), POLICY_FORMULAS[kind].is_scaled
    ).flatten()
    drawn = torch.full((4, 6), -3.0, dtype=torch.float64)  # what generation said does not count
    loss.batches.append(RolloutBatch(advantages, drawn, None, is_first_update=True))
    found = model(tokens[:, :-1], targets)
    lengths = torch.tensor(LENGTHS, dtype=torch.float64)
    weights = {"dapo": torch.ones(4), "dr_grpo": torch.full((4,), 1 / MOST_TOKENS, dtype=torch.float64)}.get(
        kind, 1 / lengths
    )
    assert found.item() == pytest.approx(-(advantages * weights * lengths).sum().item(), abs=1e-12)
    found.backward()
    gradient = model.output_weight.grad.clone()
    model.zero_grad()
    model.objective = None
    hidden = model(tokens[:, :-1])
    logs = (hidden @ model.output_weight.T).double().log_softmax(2)
    chosen = logs.gather(2, targets.clamp_min(0).unsqueeze(2)).squeeze(2) * (targets != IGNORED)
    (-(advantages * weights) * chosen.sum(1)).sum().backward()
    assert torch.allclose(gradient, model.output_weight.grad, atol=1e-6)
    sums, _ = loss.take_metrics()
    assert sums[3] == 0, "nothing is clipped"


def write_files(folder: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Prompts, a tokenizer and a reward of the user; the settings that name them."""
    write_tokenizer(folder / "tok")
    rows = [{"prompt": f"{n}+1=", "answer": str(n + 1)} for n in range(6)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "plug-ins" / "rewards").mkdir(parents=True)
    (folder / "plug-ins" / "rewards" / "letters.py").write_text(LETTERS)
    monkeypatch.setenv("PRIMUS_PLUGINS", str(folder / "plug-ins"))
    return {**SETTINGS, "sft_data_path": str(folder / "prompts.jsonl"), "tokenizer_model": str(folder / "tok")}


def read_rollout_files(run: Run) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in (run.directory / "rollouts").iterdir()}


def read_metrics(run: Run) -> list[dict[str, Any]]:
    found = [event for event in events.read_events(run.events) if event["kind"] == EVENT]
    last = {each["step"]: {k: v for k, v in each.items() if k not in ("time", "generation_s")} for each in found}
    return [last[step] for step in sorted(last)]


def test_a_killed_run_generates_and_learns_what_an_uninterrupted_one_does(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    make_run: Callable[..., Run],
    train: Callable[..., Any],
    start_workers: Callable[..., Any],
) -> None:
    given = write_files(tmp_path, monkeypatch) | {"updates_per_rollout": 2, "train_iters": 12}
    whole, killed = (make_run(name, stage="rl_trainer", **given) for name in ("whole", "killed"))
    train(whole)
    workers = start_workers(killed)
    workers.wait_for_checkpoint(3)  # in the middle of the two updates with the rollouts of step 3
    workers.send(signal.SIGKILL)
    assert workers.wait() == [-signal.SIGKILL]
    train(killed, number=1)
    assert read_rollout_files(killed) == read_rollout_files(whole)
    one, other = read_metrics(whole), read_metrics(killed)
    assert other == one and [each["step"] for each in one] == list(range(1, 13))
    rollouts = read_rollouts(whole, 3)
    assert [each.number for each in rollouts] == list(range(8, 16)), "those of step 1 served step 2 as well"
    assert len({each.prompt for each in rollouts}) == 2
    assert sum(each.advantage for each in rollouts) == pytest.approx(0, abs=1e-9)
    assert all(0 < each["mismatch_largest"] < 1e-5 for each in one[::2])
    assert one[0]["kl"] == 0.0 and one[2]["kl"] > 0, "the reference is the start"
    assert rollouts[0].rewards.keys() == {"exact", "letters"}
    assert len(rollouts[0].log_probabilities) == rollouts[0].length


@pytest.mark.slow
def test_two_processes_generate_what_one_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make_run: Callable[..., Run], start_workers: Callable[..., Any]
) -> None:
    given = write_files(tmp_path, monkeypatch) | {"train_iters": 2, "rollout_batch_size": 3}
    one, two = (make_run(name, stage="rl_trainer", **given) for name in ("one", "two"))
    start_workers(one).succeed()
    start_workers(two, world=2).succeed()
    assert [each.tokens for each in read_rollouts(one, 1)] == [each.tokens for each in read_rollouts(two, 1)]
    assert [each.advantage for each in read_rollouts(one, 1)] == [each.advantage for each in read_rollouts(two, 1)]
    for first, second in zip(read_metrics(one), read_metrics(two), strict=True):
        assert first["reward"] == pytest.approx(second["reward"])
        assert first["entropy"] == pytest.approx(second["entropy"], abs=1e-5)


def test_a_run_stops_where_generation_and_training_differ(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make_run: Callable[..., Run], train: Callable[..., Any]
) -> None:
    given = write_files(tmp_path, monkeypatch)
    run = make_run("run", stage="rl_trainer", **{**given, "rollout_mismatch_limit": 1e-20, "save_interval": 1})
    with pytest.raises(FinalError, match="step 1: the log-probabilities of generation and training differ: KL"):
        train(run)
    assert not list(run.checkpoints.glob("step_*")), "what was learnt is not kept"


def test_alarms_name_what_is_wrong() -> None:
    sound = {"entropy": 2.0, "length": 5.0, "groups_without_spread": 0.1, "reward": 0.5}
    assert find_alarms([sound] * 30) == {}
    for name, wrong in (
        ("entropy_collapse", {"entropy": 0.1}),
        ("length_growth", {"length": 11.0}),
        ("no_spread", {"groups_without_spread": 0.95}),
    ):
        assert list(find_alarms([sound] * WINDOW + [{**sound, **wrong}] * WINDOW)) == [name]
        assert find_alarms([{**sound, **wrong}] * (WINDOW - 1)) == {}


def test_samples_are_groups_of_one_prompt_and_serve_several_updates() -> None:
    prompts = type("Prompts", (), {"tokens": [[1]] * 5})
    dataset = PromptDataset(prompts, Schedule(4, 2, 3), seed=1)
    found = [dataset[index].tolist() for index in range(24)]
    assert [each[0] for each in found] == [0, 1, 2, 3] * 3 + [4, 5, 6, 7] * 3
    assert [each[2] for each in found] == [update for update in (0, 1, 2, 0, 1, 2) for _ in range(4)]
    rows = [each[1] for each in found[:4] + found[12:16]]
    assert rows[::2] == rows[1::2] and len(set(rows)) == 4


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({"loss": "sft"}, "loss: sft needs no rollouts"),
        ({"rewards": {}}, "no rewards are named"),
        ({"rewards": {"exakt": 1.0}}, "no reward 'exakt'"),
        ({"rewards": {"format": 1.0}}, "needs a regular expression"),
        ({"global_batch_size": 6}, "global_batch_size: 6 completions are not whole groups"),
        ({"max_new_tokens": 16}, "leaves a prompt no room"),
        ({"updates_per_rollout": 2, "temperature": 0.5}, "need temperature: 1"),
        ({"compile": True}, "compile: rollouts have many lengths"),
        ({"eval_interval": 2}, "eval_interval: train rl evaluates no loss"),
        ({"context_parallel_size": 2}, "context_parallel_size"),
        ({"kl_beta": -1.0}, "kl_beta"),
        ({"stage": "post_trainer"}, "loss: grpo: the module is post_trainer"),
        ({"stage": "pre_trainer", "loss": "sft"}, "num_generations: it is a setting of `train rl`"),
    ],
)
def test_a_wrong_setting_of_reinforcement_learning_is_refused(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    make_run: Callable[..., Run],
    given: dict[str, Any],
    problem: str,
) -> None:
    run = make_run("wrong", **{"stage": "rl_trainer", **write_files(tmp_path, monkeypatch), **given})
    with pytest.raises(UsageError, match=problem):
        native.check(experiment.read_run_experiment(run))


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ({"prompt": " "}, "the prompt is empty"),
        ({"prompt": []}, "the prompt is empty"),
        ({"answer": "1"}, "no prompt"),
        ({"prompt": [{"content": "a"}]}, "neither a text nor a list of messages"),
        ([1], "no prompt"),
    ],
)
def test_a_row_without_a_prompt_is_refused(row: Any, problem: str) -> None:
    with pytest.raises(UsageError, match=f"p.jsonl:1: .*{problem}"):
        parse_prompt(row, "p.jsonl:1")
