"""The weights that a run starts from, in hub names."""

from __future__ import annotations

from typing import TYPE_CHECKING

from primus.session.session import Session

if TYPE_CHECKING:
    from primus.checkpoint.weights import WeightReader


def open_loaded_weights(session: Session) -> WeightReader | None:
    """The weights of `load:`, of any format and engine; None if a run begins without them.

    Raises:
        PrimusError: The checkpoint is damaged, or of another model.
    """
    given = session.trainer.checkpoint.load if session.start is None else str(session.start.folder)
    if given is None:
        return None
    from primus.checkpoint.formats.open import find_checkpoint, open_weights
    from primus.checkpoint.formats.saved_shape import check_saved_shape

    found = find_checkpoint(given)
    check_saved_shape(found, session.trainer.model)
    return open_weights(found, session.trainer.model)


def open_start_weights(session: Session) -> WeightReader | None:
    """The weights to load before the first step: those of `load:` or initial ones; None leaves them to the engine.

    Raises:
        PrimusError: The checkpoint is damaged, or of another model.
    """
    loaded = open_loaded_weights(session)
    if loaded is not None or session.trainer.training.init == "engine":
        return loaded
    from primus.checkpoint.initial_weights import InitialWeights

    return InitialWeights(session.trainer.model, session.trainer.training.seed)
