"""Find the number and placement of CPU threads, and the memory allocator, with which an experiment trains fastest."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal

from msgspec import Meta, Struct

from primus.process import count_usable_cpus
from primus.task import TaskContext
from primus.tasks.tune import _search
from primus.tuning import halving
from primus.tuning.allocators import list_allocators

OVERRIDES = True
PLACEMENTS = ("false", "close", "spread")
"""Values of OMP_PROC_BIND (OpenMP 5.2, 21.1.7): not bound, or bound to near or distant cores."""


class Options(Struct, frozen=True, kw_only=True):
    """Options of `tune threads`."""

    config: Annotated[str, Meta(extra={"aliases": ("--exp",)})]
    """Experiment file."""
    threads: tuple[Annotated[int, Meta(gt=0)], ...] = ()
    """Numbers of threads of a process (default: powers of two up to its share of the cores, and the share)."""
    allocators: tuple[Literal["default", "glibc", "jemalloc", "tcmalloc"], ...] = ()
    """Memory allocators: the default; glibc that keeps freed memory; jemalloc; tcmalloc (default: all that are
    installed)."""
    steps: Annotated[int, Meta(ge=6)] = 60
    """Steps of the longest trials."""
    workspace: str = "./output"
    """Folder of the study, below tune/."""
    trial_timeout: Annotated[float, Meta(gt=0)] = 1800.0
    """Time limit of a trial in seconds."""


def run(options: Options, context: TaskContext) -> None:
    """Search, and print the best combination.

    Raises:
        UnfitError: An allocator that was asked for is not installed.
        UsageError: The experiment is invalid, or the search is running already.
        PrimusError: No trial gave a result.
    """
    result = _search.run_search(_build_request(options, context), context)
    context.result(result, _search.format_search_result(result))


def plan_notes(options: Options, context: TaskContext) -> Sequence[str]:
    """What a dry run prints."""
    return _search.list_plan_notes(_build_request(options, context), context)


def _build_request(options: Options, context: TaskContext) -> _search.SearchRequest:
    threads = options.threads or list_thread_numbers(
        count_usable_cpus() // (context.layout.nproc if context.layout else 1)
    )
    return _search.SearchRequest(
        config=options.config,
        keys=(f"env.OMP_NUM_THREADS={','.join(map(str, threads))}", f"env.OMP_PROC_BIND={','.join(PLACEMENTS)}"),
        variants=tuple(
            {f"env.{name}": value for name, value in variables.items()}
            for variables in list_allocators(options.allocators, context.environ).values()
        ),
        metric="tokens_per_s",
        rungs=halving.list_rungs(options.steps, num_rungs=3),
        workspace=options.workspace,
        timeout_s=options.trial_timeout,
    )


def list_thread_numbers(share: int) -> tuple[int, ...]:
    """Powers of two up to a process's share of the cores, and the share itself."""
    share = max(1, share)
    powers = [2**power for power in range(share.bit_length()) if 2**power <= share]
    return tuple(sorted({*powers, share}))
