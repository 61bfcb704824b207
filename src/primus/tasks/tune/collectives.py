"""Find the algorithm, protocol and channels of NCCL or RCCL with which an experiment trains fastest."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from msgspec import Meta, Struct

from primus import experiment
from primus.errors import UnfitError, UsageError
from primus.task import TaskContext
from primus.tuning.search import halving, search

OVERRIDES = True
ALGORITHMS = ("Ring", "Tree")
PROTOCOLS = ("Simple", "LL128")
"""Values that NCCL and RCCL share. LL is for small messages, and NVLS is chosen where a switch offers it (NCCL user
guide, NCCL_ALGO and NCCL_PROTO)."""


class Options(Struct, frozen=True, kw_only=True):
    """Options of `tune collectives`."""

    config: Annotated[str, Meta(extra={"aliases": ("--exp",)})]
    """Experiment file."""
    algorithms: tuple[str, ...] = ALGORITHMS
    """Values of NCCL_ALGO."""
    protocols: tuple[str, ...] = PROTOCOLS
    """Values of NCCL_PROTO."""
    channels: tuple[Annotated[int, Meta(gt=0)], ...] = ()
    """Values of NCCL_MIN_NCHANNELS (default: the library's choice)."""
    steps: Annotated[int, Meta(ge=6)] = 60
    """Steps of the longest trials."""
    workspace: str = "./output"
    """Folder of the study, below tune/."""
    trial_timeout: Annotated[float, Meta(gt=0)] = 1800.0
    """Time limit of a trial in seconds."""


def run(options: Options, context: TaskContext) -> None:
    """Search, and print the best values.

    Raises:
        UnfitError: Processes of this machine communicate by gloo, which has no such settings.
        UsageError: The experiment is invalid, has one process, or the search is running already.
        PrimusError: No trial gave a result.
    """
    _check_library(options, context)
    result = search.run_search(_build_request(options), context)
    context.result(result, search.format_search_result(result))


def plan_notes(options: Options, context: TaskContext) -> Sequence[str]:
    """What a dry run prints."""
    return search.list_plan_notes(_build_request(options), context)


def _check_library(options: Options, context: TaskContext) -> None:
    resolved = experiment.resolve_experiment(Path(options.config), context.overrides, context.environ)
    if not context.facts().devices or resolved.experiment.trainer.training.device == "cpu":
        raise UnfitError(
            "gloo, which processes on CPUs use, has no settings to tune",
            "its interface: GLOO_SOCKET_IFNAME; threads: tune train --keys env.OMP_NUM_THREADS=1,2,4",
        )
    if context.layout is None or context.layout.nproc == 1:
        raise UsageError("one process has no collectives", "start it with --nproc 2 or more")
    if resolved.experiment.trainer.training.deterministic:
        raise UsageError("deterministic: true needs NCCL_ALGO=Ring", "tune without it")


def _build_request(options: Options) -> search.SearchRequest:
    keys = [f"env.NCCL_ALGO={','.join(options.algorithms)}", f"env.NCCL_PROTO={','.join(options.protocols)}"]
    if options.channels:
        keys.append(f"env.NCCL_MIN_NCHANNELS={','.join(map(str, options.channels))}")
    return search.SearchRequest(
        config=options.config,
        keys=tuple(keys),
        metric="tokens_per_s",
        rungs=halving.list_rungs(options.steps, num_rungs=3),
        workspace=options.workspace,
        timeout_s=options.trial_timeout,
    )
