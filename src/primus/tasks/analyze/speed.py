"""Predict the step time, memory and cost of an experiment on machines that you do not have access to."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from msgspec import Meta, Struct

from primus import experiment
from primus.prediction.device_rates import read_rates
from primus.prediction.format_prediction import format_prediction
from primus.prediction.prediction import find_machine, predict
from primus.task import TaskContext

OVERRIDES = True


class Options(Struct, frozen=True, kw_only=True):
    """Options of `analyze speed`."""

    config: Annotated[str, Meta(extra={"aliases": ("--exp",)})]
    """Experiment file."""
    assume: str
    """Machine: MODEL or MODEL:GPUS, such as mi300x:8."""
    nnodes: Annotated[int, Meta(ge=1)] = 1
    """Number of such machines."""
    stage: str | None = None
    """Module of the file, such as post_trainer (default: the only one)."""
    explain: bool = False
    """Also show the three terms that dominate, what would change them, and the source of each rate."""
    price_per_gpu_hour: Annotated[float, Meta(gt=0)] | None = None
    """Price of a GPU for an hour, for the cost of tokens."""
    measured: tuple[str, ...] = ()
    """JSON results of `benchmark gemm` and `collectives` on such a machine, in place of the rates of its profile."""


def run(options: Options, context: TaskContext) -> None:
    """Print the prediction.

    Raises:
        UsageError: The experiment is wrong, nothing divides, or the profile of the machine lacks figures.
    """
    resolved = experiment.resolve_experiment(
        Path(options.config), context.overrides, context.environ, options.stage, is_elsewhere=True
    )
    rates = read_rates(*find_machine(options.assume))
    if options.measured:
        from primus.prediction.measured_rates import replace_rates  # reads results of benchmarks

        rates = replace_rates(rates, options.measured)
    trainer = resolved.experiment.trainer
    found = predict(trainer, options.assume, options.nnodes, rates=rates, price=options.price_per_gpu_hour)
    context.result(found, format_prediction(found, explain=options.explain))
