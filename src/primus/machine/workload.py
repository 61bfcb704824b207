"""A job as far as the variables of its processes depend on it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from msgspec import Struct

if TYPE_CHECKING:
    from primus.config.schema import Experiment


class JobWorkload(Struct, frozen=True, kw_only=True):
    """A job as far as variables depend on it."""

    framework: str
    """Name of the backend."""
    tensor: int = 1
    """Devices that share each layer's matrices."""
    pipeline: int = 1
    context: int = 1
    """Devices that share each sequence."""
    expert: int = 1
    """Devices that share the experts."""
    options: Mapping[str, object] = {}
    """Settings of the backend's own, such as `use_torch_fsdp2`."""

    def is_on(self, *names: str) -> bool:
        """Whether any of these settings of the backend is on."""
        return any(bool(self.options.get(name)) for name in names)


def build_workload(experiment: Experiment) -> JobWorkload:
    """The workload of an experiment."""
    trainer, parallel = experiment.trainer, experiment.trainer.parallel
    return JobWorkload(
        framework=trainer.framework,
        tensor=parallel.tensor_model_parallel_size,
        pipeline=parallel.pipeline_model_parallel_size,
        context=parallel.context_parallel_size,
        expert=parallel.expert_model_parallel_size,
        options=trainer.backend_args,
    )
