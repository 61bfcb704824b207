"""Find the fastest combination of settings by short training runs; writes a patch of the experiment file."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

from msgspec import Meta, Struct

from primus.task import TaskContext
from primus.tuning.search import halving, search

OVERRIDES = True


class Options(Struct, frozen=True, kw_only=True):
    """Options of `tune train`."""

    config: Annotated[str, Meta(extra={"aliases": ("--exp",)})]
    """Experiment file."""
    keys: tuple[str, ...]
    """Keys with their values: micro_batch_size=1,2,4 recompute_activations=true,false."""
    steps: Annotated[int, Meta(ge=6)] = 60
    """Steps of the longest trials; most candidates take a ninth of them."""
    workspace: str = "./output"
    """Folder of the study, below tune/."""
    trial_timeout: Annotated[float, Meta(gt=0)] = 1800.0
    """Time limit of a trial in seconds."""


def run(options: Options, context: TaskContext) -> None:
    """Search, and print the best settings.

    Raises:
        UsageError: The experiment or a key is invalid, or the search is running already.
        PrimusError: No trial gave a result.
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
        metric="tokens_per_s",
        rungs=halving.list_rungs(options.steps, num_rungs=3),
        workspace=options.workspace,
        timeout_s=options.trial_timeout,
    )
