"""Settings of reinforcement learning, and the losses by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, NamedTuple

import msgspec
from msgspec import Meta, Struct

Positive = Annotated[int, Meta(ge=1)]
PositiveNumber = Annotated[float, Meta(gt=0)]


class PolicyFormula(NamedTuple):
    """A loss of the completions of one prompt, whose rewards are compared with each other."""

    formula: str
    """r: ratio of the probabilities of a token after and before the updates; A: advantage; |o|: tokens of a
    completion; the mean is over completions."""
    paper: str
    kl_beta: float = 0.0
    """Weight of the KL divergence from the reference, where none is set."""
    clip_high: float = 0.2
    """Where none is set."""
    clip_low: float = 0.2
    """Where none is set."""
    is_scaled: bool = True
    """Whether advantages are divided by the standard deviation of the rewards of their group."""


POLICY_FORMULAS = {
    "grpo": PolicyFormula(
        "-mean(1/|o| sum(min(r A, clip(r) A) - kl_beta KL)), A = (R - mean(R)) / std(R)",
        "arXiv 2402.03300, equations 3 and 4",
        kl_beta=0.04,
    ),
    "dapo": PolicyFormula(
        "-sum(min(r A, clip(r) A)) / tokens of all completions, A = (R - mean(R)) / std(R)",
        "arXiv 2503.14476, equation 8, without its dynamic sampling",
        clip_high=0.28,
    ),
    "dr_grpo": PolicyFormula(
        "-mean(sum(min(r A, clip(r) A)) / max_new_tokens), A = R - mean(R)",
        "arXiv 2503.20783, section 3.2",
        is_scaled=False,
    ),
    "gspo": PolicyFormula(
        "-mean(min(s A, clip(s) A)), s = exp(mean(log r)), A = (R - mean(R)) / std(R)",
        "arXiv 2507.18071, equations 5 to 7, clipped as in its section 5.1",
        clip_high=4e-4,
        clip_low=3e-4,
    ),
}


class PolicySettings(Struct, frozen=True, kw_only=True):
    """How completions of the prompts of sft_data_path are generated, rewarded and learnt from."""

    num_generations: Annotated[int, Meta(ge=2)] = 8
    """Completions of a prompt, whose rewards are compared."""
    max_new_tokens: Positive = 256
    """Most tokens of a completion."""
    temperature: PositiveNumber = 1.0
    """Divisor of the logits when completions are drawn, and in their loss."""
    rollout_batch_size: Positive | None = None
    """Completions that a process generates at a time, whose caches share its memory; all of a step when null."""
    updates_per_rollout: Positive = 1
    """Optimizer steps with the same completions; from the second on, ratios are clipped."""
    rewards: dict[str, float] = {}
    """Weights of the rewards by name: exact, final_number, format, json_object, or files rewards/NAME.py of yours."""
    reward_pattern: str | None = None
    """Regular expression for the reward `format`."""
    reward_timeout_s: PositiveNumber = 10.0
    """Longest time of one reward of one completion, in seconds."""
    reward_on_error: Literal["stop", "zero"] = "stop"
    """What a reward that fails, hangs or is not a finite number means: the run stops, or the reward is 0."""
    shuffle_rewards: bool = False
    """Give the rewards of a step to its completions at random: a control, in which nothing can be learnt."""
    clip_low: PositiveNumber | None = None
    """Ratios below 1 - this are clipped; 0.2 when null, of gspo 3e-4."""
    clip_high: PositiveNumber | None = None
    """Ratios above 1 + this are clipped; 0.2 when null, of dapo 0.28, of gspo 4e-4."""
    kl_beta: Annotated[float, Meta(ge=0)] | None = None
    """Weight of the KL divergence from the weights that the run starts from; 0.04 of grpo when null, else 0."""
    rollout_mismatch_limit: PositiveNumber = 0.015
    """The run stops where the KL divergence between the log-probabilities of generation and training exceeds this."""


def read_policy_settings(backend_args: Mapping[str, Any]) -> PolicySettings:
    """The settings among those of a framework, which were checked before."""
    names = PolicySettings.__struct_fields__
    given = {key: value for key, value in backend_args.items() if key in names and value is not None}
    return msgspec.convert(given, PolicySettings)


def learns_from_rewards(backend_args: Mapping[str, Any]) -> bool:
    """Whether the rows of sft_data_path are prompts, whose completions the model generates."""
    return backend_args.get("loss") in POLICY_FORMULAS
