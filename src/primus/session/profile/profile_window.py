"""The steps of a run that are profiled, and by which processes; no tensor library is imported."""

from __future__ import annotations

import re
from dataclasses import dataclass

from primus.config.schema import LoggingConfig, Trainer
from primus.errors import UsageError

FOLDER = "profiles"
"""Folder of the profiles, in the run folder."""
_WINDOW = re.compile(r"(?:steps=)?(\d+)(?::(\d+))?")
_HINT = "write steps=FIRST:LAST, such as steps=5:8 for steps 5 to 8, counted from 1"


@dataclass(frozen=True)
class ProfileWindow:
    """Steps `first` to `last`, counted from 1 and both included, in the processes `ranks`."""

    first: int
    last: int
    ranks: tuple[int, ...]

    def name_file(self, attempt: int, rank: int) -> str:
        """Path of a profile in the run folder, without its suffix."""
        return f"{FOLDER}/attempt_{attempt}/rank_{rank}.steps_{self.first}-{self.last}"


def find_profile_window(trainer: Trainer) -> ProfileWindow | None:
    """The steps that an experiment profiles; None if it does not.

    Raises:
        UsageError: The steps or ranks are not valid, or the run does not reach the steps.
    """
    config, train_iters = trainer.logging, trainer.training.train_iters
    if config.profile is False or config.profile in ("", "false"):
        return None
    first, last = _parse_steps(config)
    if not 1 <= first <= last:
        raise UsageError(f"profile: steps {first} to {last}: the range is empty", _HINT)
    if first > train_iters:
        raise UsageError(
            f"profile: step {first} is past the last step of the run, {train_iters}",
            f"choose steps up to {train_iters}, or raise train_iters",
        )
    return ProfileWindow(first, min(last, train_iters), _parse_ranks(config))


def choose_recording_ranks(window: ProfileWindow, world_size: int) -> tuple[int, ...]:
    """The ranks that exist and record.

    Raises:
        UsageError: A rank does not exist.
    """
    absent = [rank for rank in window.ranks if rank >= world_size]
    if absent:
        plural = "es" if world_size > 1 else ""
        raise UsageError(
            f"profile_ranks: rank {absent[0]} does not exist: the run has {world_size} process{plural}",
            f"choose ranks from 0 to {world_size - 1}",
        )
    # Megatron-LM: an empty list means all ranks.
    return window.ranks or tuple(range(world_size))


def _parse_steps(config: LoggingConfig) -> tuple[int, int]:
    if config.profile is True or config.profile == "true":
        return config.profile_step_start, config.profile_step_end - 1
    match = _WINDOW.fullmatch(str(config.profile).replace(" ", ""))
    if match is None:
        raise UsageError(f"profile: not a range of steps: {config.profile!r}", _HINT)
    first = int(match[1])
    return first, int(match[2]) if match[2] else first


def _parse_ranks(config: LoggingConfig) -> tuple[int, ...]:
    given = config.profile_ranks
    words = given if isinstance(given, list) else str(given).strip("[]").split(",")
    try:
        ranks = {int(word) for word in words if str(word).strip()}
    except ValueError:
        ranks = {-1}
    if any(rank < 0 for rank in ranks):
        raise UsageError(f"profile_ranks: not a list of ranks: {given!r}", "write numbers from 0, such as 0,8")
    return tuple(sorted(ranks))
