"""The weights that a run starts from, in hub names."""

from __future__ import annotations

from typing import TYPE_CHECKING

from primus.errors import PrimusError
from primus.session.session import Session

if TYPE_CHECKING:
    from primus.checkpoint.weights import WeightReader


def open_start_weights(session: Session) -> WeightReader | None:
    """The weights to load before the first step: those of `load:` or initial ones; None leaves them to the engine.

    Raises:
        PrimusError: The checkpoint cannot be read.
    """
    if session.start is not None:
        raise PrimusError(
            f"{session.start.folder}: {session.engine.backend} cannot begin with the weights of a checkpoint yet",
            "remove load:",
        )
    if session.trainer.training.init == "engine":
        return None
    from primus.checkpoint import initial_weights

    return initial_weights.InitialWeights(session.trainer.model, session.trainer.training.seed)
