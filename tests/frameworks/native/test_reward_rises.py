"""Reinforcement learning learns from rewards, and from nothing else."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import pytest
import yaml

from primus.package_files import find_example
from primus.runs import events
from primus.runs.store import Run


@pytest.mark.slow
def test_the_reward_of_the_quick_start_rises_and_does_not_with_shuffled_rewards(
    make_run: Callable[..., Run], train: Callable[..., Any]
) -> None:
    example = find_example("posttrain/quickstart-grpo.yaml")
    written = yaml.safe_load(example.read_text())["modules"]["rl_trainer"]["overrides"]
    given = {**written, "sft_data_path": str(example.with_name("sums.jsonl")), "mock_data": False, "eval_iters": 0}
    given |= {"tokenizer_model": str(example.with_name("tokenizer")), "train_iters": 30, "lr_decay_style": "constant"}
    given |= {"num_generations": 8, "micro_batch_size": 200, "global_batch_size": 200}  # 25 prompts in half the time

    def train_one(**changes: Any) -> list[float]:
        run = make_run("-".join(map(str, changes.values())), stage="rl_trainer", **{**given, **changes})
        train(run)
        return [each["reward"] for each in events.read_events(run.events) if each["kind"] == "rollouts"]

    for seed in (1, 2, 3):
        rewards = train_one(seed=seed)
        assert statistics.mean(rewards[:5]) < 0.03
        assert statistics.mean(rewards[-5:]) > 0.15, seed
    shuffled = train_one(seed=1, shuffle_rewards=True)
    assert statistics.mean(shuffled[-5:]) < 0.03
