"""Execute a step of chosen ranks of a training on fake tensors: whether it runs, its memory, exchanges and time."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from msgspec import Meta, Struct

from primus import experiment
from primus.errors import EXIT_OK, UsageError
from primus.runs import files
from primus.task import TaskContext

OVERRIDES = True
EXIT_DOES_NOT_FIT = 1


class Options(Struct, frozen=True, kw_only=True):
    """Options of `analyze layout`."""

    config: Annotated[str, Meta(extra={"aliases": ("--exp",)})]
    """Experiment file."""
    assume: str | None = None
    """Machine of each node: MODEL or MODEL:GPUS, such as mi300x:8, or cpu (default: this one)."""
    nnodes: Annotated[int, Meta(ge=1)] = 1
    """Number of such nodes."""
    rank: str = "all-kinds"
    """Ranks to execute: a list such as 0,37, or all-kinds for one of each pipeline stage that differs."""
    engine: str | None = None
    """Framework that trains, instead of that of the file."""
    stage: str | None = None
    """Module of the file, such as post_trainer (default: the only one)."""
    explain: bool = False
    """Also show the three terms that dominate the predicted step, what would change them, and the source of each
    rate."""
    price_per_gpu_hour: Annotated[float, Meta(gt=0)] | None = None
    """Price of a GPU for an hour, for the cost of tokens."""
    measured: tuple[str, ...] = ()
    """JSON results of `benchmark gemm` and `collectives` on such a machine, in place of the rates of its profile."""
    output: str | None = None
    """Also write a page (.html) with memory, computation and communication over the step."""


def run(options: Options, context: TaskContext) -> int:
    """Print what each rank does; the exit code is 1 if one does not fit the memory of its device.

    Raises:
        UsageError: The layout cannot run; the message has the rank and the error of the cluster.
    """
    # For this task only: profiles, processes and tables.
    from primus.prediction import layout_machine, layout_run
    from primus.prediction.format_layout import format_layout
    from primus.prediction.layout_page import format_layout_page

    if options.output and Path(options.output).suffix != ".html":
        raise UsageError(f"--output {options.output}: the memory is drawn on a page", "use a name that ends with .html")
    overrides = context.overrides if options.engine is None else (*context.overrides, "--framework", options.engine)
    resolved = experiment.resolve_experiment(Path(options.config), overrides, context.environ, options.stage)
    machine = layout_machine.describe_machine(options.assume, context.facts, options.nnodes)
    report = layout_run.execute_layout(
        resolved, machine, options.rank, context.environ, price=options.price_per_gpu_hour, measured=options.measured
    )
    context.result(report, format_layout(report, explain=options.explain))
    if options.output:
        files.write_text(Path(options.output), format_layout_page(report))
        context.say(f"\npage: {options.output}")
    return EXIT_OK if report.fits else EXIT_DOES_NOT_FIT
