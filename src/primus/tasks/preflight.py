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


REFERENCE_FRAMEWORKS = PlugInKind[ReferenceFramework]("frameworks", ReferenceFramework)


def work(attempt: Attempt) -> None:
    """Measure, as one rank of the run that `--perf` starts."""
    from primus.measure import suite
    from primus.measure.endurance.endurance import EnduranceWorkload

    train = registry.load_plug_in(REFERENCE_FRAMEWORKS, "native").train_reference
    suite.run(attempt, session.build_worker_config(attempt), EnduranceWorkload(train=train))
