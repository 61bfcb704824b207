"""Rollouts of reinforcement learning in a run folder: a file for each step and process, a completion a line."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from primus.runs.files import write_bytes
from primus.runs.store import Run

FOLDER = "rollouts"


class Rollout(Struct, frozen=True, kw_only=True):
    """A completion that the model was trained on."""

    number: int
    """Of the completion in the run; consecutive ones have the same prompt."""
    row: int
    """Line of the prompt among those that fit, from 1."""
    prompt: str
    completion: str
    """Without the token that ends it."""
    tokens: list[int]
    """Of the completion, with the one that ends it."""
    log_probabilities: list[float]
    """Of each token when it was drawn, at temperature 1."""
    length: int
    """Number of tokens."""
    stop_reason: str
    """``stop``: it has ended; ``length``: `max_new_tokens` were drawn; ``context``: the model's context is full."""
    rewards: dict[str, float]
    """By name, without weights."""
    reward: float
    """Their weighted sum."""
    advantage: float
    problems: list[str] = []
    """Rewards that failed and count as 0."""


def write_rollouts(run: Run, step: int, rank: int, rollouts: Sequence[Rollout]) -> None:
    """Write what one process has generated for the step, replacing what a killed attempt has left."""
    data = b"".join(msgspec.json.encode(rollout) + b"\n" for rollout in rollouts)
    write_bytes(run.directory / FOLDER / f"step_{step:08d}_rank_{rank}.jsonl", data)


def read_rollouts(run: Run, step: int) -> list[Rollout]:
    """The rollouts of a step in their order; none if it has none."""
    files = (run.directory / FOLDER).glob(f"step_{step:08d}_rank_*.jsonl")
    decoder = msgspec.json.Decoder(Rollout)
    return sorted((each for file in files for each in decoder.decode_lines(file.read_bytes())), key=_get_number)


def list_rollout_steps(run: Run) -> list[int]:
    """The steps that have rollouts."""
    return sorted({_read_step(path) for path in (run.directory / FOLDER).glob("step_*_rank_*.jsonl")})


def _get_number(rollout: Rollout) -> Any:
    return rollout.number


def _read_step(path: Path) -> int:
    return int(path.name.split("_")[1])
