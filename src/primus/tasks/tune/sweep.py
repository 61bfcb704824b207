"""Train every combination of settings, and compare them by a metric, such as the loss by learning rate."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

from msgspec import Meta, Struct

from primus.task import TaskContext
from primus.tuning.search import search

OVERRIDES = True


class Options(Struct, frozen=True, kw_only=True):
    """Options of `tune sweep`."""

    config: Annotated[str, Meta(extra={"aliases": ("--exp",)})]
    """Experiment file."""
    keys: tuple[str, ...]
    """Keys with their values: lr=1e-4,3e-4,1e-3."""
    metric: str = "loss"
    """Value of the step events: loss (mean of the last tenth of the steps), tokens_per_s, memory_gib ..."""
    steps: Annotated[int, Meta(ge=6)] = 100
    """Steps of each run (train_iters); the learning-rate schedule ends there."""
    workspace: str = "./output"
    """Folder of the study, below tune/."""
    trial_timeout: Annotated[float, Meta(gt=0)] = 86400.0
    """Time limit of a run in seconds."""


def run(options: Options, context: TaskContext) -> None:
    """Train all, and print the best settings.

    Raises:
        UsageError: The experiment, a key or the metric is invalid, or the search is running already.
        PrimusError: No run gave a result.
    """
    result = search.run_search(_build_request(options), context)
    context.result(result, search.format_search_result(result))


def plan_notes(options: Options, context: TaskContext) -> Sequence[str]:
    """What a dry run prints."""
    return search.list_plan_notes(_build_request(options), context)


def _build_request(options: Options) -> search.SearchRequest:
    return search.SearchRequest(
        config=options.config,
        keys=options.keys,
        metric=options.metric,
        rungs=[options.steps],
        workspace=options.workspace,
        timeout_s=options.trial_timeout,
    )
