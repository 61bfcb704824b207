"""The contract of rewards: what a completion of a model is worth in reinforcement learning.

An experiment names them, with their weights::

    overrides:
      rewards: {exact: 1.0, format: 0.2}
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from primus.contract import PlugInKind


class Reward(Protocol):
    """A reward: `rewards/NAME.py`, named in an experiment of `train rl`.

    It runs in a process of its own beside each worker, without GPUs and without variables that hold secrets. What it
    prints goes to the log of the rank.
    """

    def reward(self, prompt: str, completion: str, row: Mapping[str, Any], /) -> float | int | bool:
        """What `completion` is worth as the answer to `prompt`.

        Called once for each completion. `row` has the columns of the prompt in the data, such as `answer`. The same
        arguments must have the same result: a resumed run would otherwise train differently. An exception, a value that
        is not a finite number, and a call that takes longer than `reward_timeout_s` end the run, or count as 0 with
        `reward_on_error: zero`.
        """
        ...


REWARDS = PlugInKind[Reward]("rewards", Reward)
