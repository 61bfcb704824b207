"""Predict how an experiment scales: speed, memory, communication, failures and checkpoints by number of nodes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from msgspec import Meta, Struct

from primus import experiment
from primus.errors import UsageError
from primus.prediction.device_rates import read_rates
from primus.prediction.prediction import find_machine
from primus.prediction.scaling import FAILURES_PER_DEVICE_DAY, ScalingRequest, predict_scaling
from primus.prediction.scaling_page import format_scaling, format_scaling_page
from primus.prediction.step_layout import build_layout
from primus.runs import files
from primus.task import TaskContext

OVERRIDES = True


class Options(Struct, frozen=True, kw_only=True):
    """Options of `analyze scaling`."""

    config: Annotated[str, Meta(extra={"aliases": ("--exp",)})]
    """Experiment file."""
    assume: str
    """Machine: MODEL or MODEL:GPUS, such as mi300x:8."""
    nnodes: str = "1,8,64,512,4096"
    """Numbers of such machines, separated by commas."""
    stage: str | None = None
    """Module of the file, such as post_trainer (default: the only one)."""
    keep_batch: bool = False
    """Keep the global batch, so that replicas have fewer micro batches; by default it grows with the replicas."""
    failures_per_gpu_day: Annotated[float, Meta(gt=0)] = FAILURES_PER_DEVICE_DAY
    """Failures of one GPU in a day that end a run, its part of node and network included (default: Llama 3's)."""
    save_seconds: Annotated[float, Meta(gt=0)] | None = None
    """Seconds that training waits for a save (default: the state at 1 GB/s for each GPU, 200 in all)."""
    output: str | None = None
    """Also write a page (.html) with charts."""


def run(options: Options, context: TaskContext) -> None:
    """Print the prediction, and write its page on request.

    Raises:
        UsageError: The experiment is wrong, a number of nodes cannot be laid out, or the profile lacks figures.
        PrimusError: The page cannot be written.
    """
    nodes = _parse_nodes(options.nnodes)
    output = Path(options.output) if options.output else None
    if output and output.suffix != ".html":
        raise UsageError(f"--output {output}: not a page", "use a name that ends with .html")
    resolved = experiment.resolve_experiment(
        Path(options.config), context.overrides, context.environ, options.stage, is_elsewhere=True
    )
    profile, devices_of_node = find_machine(options.assume)
    rates = read_rates(profile, devices_of_node)
    request = ScalingRequest(
        trainer=resolved.experiment.trainer,
        rates=rates,
        devices_of_node=devices_of_node,
        failures_per_device_day=options.failures_per_gpu_day,
        save_s=options.save_seconds,
        keeps_batch=options.keep_batch,
    )
    points = predict_scaling(request, nodes)
    title = f"{resolved.experiment.exp_name} on nodes of {options.assume}, predicted"
    assumptions = rates.list_assumptions(build_layout(request.trainer, nodes[0] * devices_of_node).precision)
    context.result({"points": points, "assumptions": assumptions}, format_scaling(title, points, assumptions))
    if output:
        files.write_text(output, format_scaling_page(title, points, assumptions))
        context.say(f"\npicture: {output}")


def _parse_nodes(text: str) -> list[int]:
    parts = text.split(",")
    if not all(part.strip().isdecimal() and int(part) > 0 for part in parts):
        raise UsageError(f"--nnodes {text}: not numbers of nodes", "separate them by commas: 1,8,64")
    return sorted({int(part) for part in parts})
