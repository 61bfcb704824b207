"""Check whether this node, or all nodes of a launch, are fit for a long job."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from primus import registry
from primus.contract import PlugInKind
from primus.preflight import session
from primus.preflight.options import Options
from primus.preflight.session import prepare, run

if TYPE_CHECKING:
    import torch

    from primus.runs.attempt import Attempt

__all__ = ["Options", "prepare", "run", "work"]


class ReferenceFramework(Protocol):
    """What preflight needs of the native framework."""

    def train_reference(self, device: torch.device, /) -> tuple[str, float]:
        """Train a small model in a fixed way: a digest of losses and weights, and the last loss."""
        ...

    def try_kernels(self, device: torch.device, /) -> list[tuple[str, str]]:
        """Try its kernels against float64: their names, and what is wrong with each."""
        ...


REFERENCE_FRAMEWORKS = PlugInKind[ReferenceFramework]("frameworks", ReferenceFramework)


def work(attempt: Attempt) -> None:
    """Measure, as one rank of the run that `--perf` starts."""
    from primus.measure import suite
    from primus.measure.endurance.endurance import EnduranceWorkload

    native = registry.load_plug_in(REFERENCE_FRAMEWORKS, "native")
    workload = EnduranceWorkload(train=native.train_reference, try_kernels=native.try_kernels)
    suite.run(attempt, session.build_worker_config(attempt), workload)
