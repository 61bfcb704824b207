"""Pipeline schedules take micro batches that are split already, as torchtitan 0.3 passes them.

torchtitan calls `step(arg_mbs=..., kwarg_mbs=..., target_mbs=...)`, which torch 2.14 has; torch 2.13 takes these for
arguments of the model and splits them again.
"""

from __future__ import annotations

from datetime import date
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from primus.patch import Patch, includes_version

PATCH = Patch(
    target="torchtitan",
    module="torchtitan",
    versions=">=0.3,<0.4",
    reason="torchtitan 0.3 gives pipeline schedules micro batches, which torch before 2.14 splits again",
    link="https://github.com/pytorch/pytorch/pull/188500",
    expires=date(2027, 6, 30),
    backend="torchtitan",
)


def is_needed() -> bool:
    """Whether torch is older than 2.14."""
    try:
        return includes_version("<2.14", version("torch"))
    except PackageNotFoundError:
        return False


def apply() -> None:
    """Add the arguments to both base classes of schedules."""
    from torch.distributed.pipelining import schedules

    kinds: tuple[Any, ...] = (schedules.PipelineScheduleSingle, schedules.PipelineScheduleMulti)
    for kind in kinds:
        kind.step = accept_micro_batches(kind.step)


def accept_micro_batches(step: Any) -> Any:
    """`step` of a schedule, which also takes lists of micro batches."""

    def step_micro_batches(
        schedule: Any,
        *args: Any,
        arg_mbs: list[tuple[Any, ...]] | None = None,
        kwarg_mbs: list[dict[str, object]] | None = None,
        target_mbs: list[Any] | None = None,
        **options: Any,
    ) -> Any:
        if arg_mbs is None and kwarg_mbs is None and target_mbs is None:
            return step(schedule, *args, **options)
        stages = schedule._stages if hasattr(schedule, "_stages") else [schedule._stage]
        for stage in stages:
            stage.has_backward = schedule._has_backward
            stage.clear_runtime_states()
        count = schedule._n_microbatches
        returns_outputs = options.get("return_outputs", True)
        schedule._step_microbatches(
            arg_mbs or [()] * count,
            kwarg_mbs or [{} for _ in range(count)],
            target_mbs,
            options.get("losses"),
            returns_outputs,
            loss_kwargs=options.get("loss_kwargs"),
        )
        last = next((stage for stage in stages if stage.is_last), None)
        return schedule._merge_outputs(last.output_chunks) if last is not None and returns_outputs else None

    return step_micro_batches
