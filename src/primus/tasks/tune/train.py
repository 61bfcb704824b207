"""Find the fastest combination of settings by short training runs; writes a patch of the experiment file."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

from msgspec import Meta, Struct

from primus.config.load import Resolved
from primus.errors import UsageError
from primus.task import TaskContext
from primus.tuning.search import halving, search
from primus.tuning.search.ranking import Predict, TrialPrediction

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
    assume: str | None = None
    """Machine whose rates order the candidates: MODEL or MODEL:GPUS (default: this one, if its rates are known)."""
    trial_timeout: Annotated[float, Meta(gt=0)] = 1800.0
    """Time limit of a trial in seconds."""


def run(options: Options, context: TaskContext) -> None:
    """Search, and print the best settings.

    Raises:
        UsageError: The experiment or a key is invalid, or the search is running already.
        PrimusError: No trial gave a result.
    """
    result = search.run_search(_build_request(options, context), context)
    context.result(result, search.format_search_result(result))


def plan_notes(options: Options, context: TaskContext) -> Sequence[str]:
    """What a dry run prints."""
    return search.list_plan_notes(_build_request(options, context), context)


def _build_request(options: Options, context: TaskContext) -> search.SearchRequest:
    return search.SearchRequest(
        config=options.config,
        keys=options.keys,
        metric="tokens_per_s",
        rungs=halving.list_rungs(options.steps, num_rungs=3),
        workspace=options.workspace,
        timeout_s=options.trial_timeout,
        predict=_find_predictor(options.assume, context),
    )


def _find_predictor(assume: str | None, context: TaskContext) -> Predict | None:
    """Predicts the trials on this machine or an assumed one; None where its rates are not known.

    Raises:
        UsageError: The assumed machine does not exist, or its profile lacks figures.
    """
    # For this task only: profiles, and the model of time.
    from primus.prediction.device_rates import read_rates
    from primus.prediction.layout_machine import describe_machine
    from primus.prediction.prediction import find_machine
    from primus.prediction.step_layout import build_layout
    from primus.prediction.step_memory import find_largest, predict_memory
    from primus.prediction.step_time import predict_step

    machine = describe_machine(assume, context.facts, 1)
    if machine.name == "CPU":
        return None
    try:
        rates = read_rates(find_machine(machine.model)[0], machine.devices_per_node)
    except UsageError:
        if assume is not None:
            raise
        return None
    is_local = assume is None and context.layout is not None
    devices = context.layout.nproc if is_local and context.layout is not None else machine.devices_per_node

    def predict(resolved: Resolved) -> TrialPrediction:
        trainer = resolved.experiment.trainer
        layout = build_layout(trainer, devices)
        return TrialPrediction(
            tokens_per_s=predict_step(trainer.model, layout, rates).tokens_per_s_per_device,
            memory_bytes=find_largest(predict_memory(trainer.model, layout)).total,
            device_bytes=machine.device_bytes,
        )

    return predict
