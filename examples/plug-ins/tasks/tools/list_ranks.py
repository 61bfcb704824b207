"""Start workers, each of which says its rank."""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec import Struct

from primus.plan import LaunchJob
from primus.runs.files import read_json, to_json
from primus.task import TaskContext

if TYPE_CHECKING:
    from primus.runs.attempt import Attempt


class Options(Struct, frozen=True, kw_only=True):
    """Options of `tools list-ranks`."""

    greeting: str = "here"
    """What each rank says."""


def prepare(options: Options, context: TaskContext) -> LaunchJob:
    """Describe the job; its files go into the run folder, where the workers read them."""
    return LaunchJob(name="list-ranks", workspace="output", files={"config/options.json": to_json(options)})


def work(attempt: Attempt) -> None:
    """Print a line as one rank, and record an event as rank 0."""
    options = read_json(attempt.run.directory / "config/options.json", Options)
    attempt.say(f"rank {attempt.rank} of {attempt.world_size}: {options.greeting}")
    attempt.event("ranks_listed", world_size=attempt.world_size)
